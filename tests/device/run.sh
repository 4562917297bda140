#!/usr/bin/env bash
# Everything that needs a real NVIDIA GPU, in one go: meant for 6 minutes on one H200.
#
# Builds the kernels, compares them with the CPU's on the GPU, looks for stray accesses and races,
# refits over real CUDA IPC between processes, and measures. Results: $OUT/device.json and
# $OUT/device.md. Needs torch with CUDA, nvcc 13, pytest, hypothesis, pybind11, ninja; msgspec is
# installed if it is missing, from the folder $WHEELS where there is no network.
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3}
OUT=$(mkdir -p "${OUT:-out/device}" && cd "${OUT:-out/device}" && pwd)

site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
if ! "$PYTHON" -c 'import msgspec' 2>/dev/null; then
    "$PYTHON" -m pip install -q --no-deps --target "$site" \
        ${WHEELS:+--no-index --find-links "$WHEELS"} msgspec
fi
export PYTHONPATH="$PWD:$site:$PWD/tests/unit:$PWD/tests/gpu:$PWD/tests/device${PYTHONPATH:+:$PYTHONPATH}"

step() {
    echo
    echo "== $1 (at ${SECONDS} s)"
}

step "build"
LORA_REFIT_CUDA=1 LORA_REFIT_BUILD_JOBS=$(nproc) "$PYTHON" setup.py -q build_ext --inplace

step "kernels against the CPU's"
"$PYTHON" -m pytest -q -p no:cacheprovider tests/device/check_kernels.py tests/device/check_merges.py

for tool in memcheck racecheck; do
    step "compute-sanitizer $tool"
    compute-sanitizer --tool "$tool" --error-exitcode 9 "$PYTHON" tests/device/sanitized.py
done

step "refits between processes: CUDA IPC, file descriptors, pinned host memory"
"$PYTHON" -m pytest -q -p no:cacheprovider tests/device/check_refit.py

step "benchmark"
"$PYTHON" tests/device/measure.py "$OUT"
step "done"
