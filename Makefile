# make venv | test | lint | demo
#
# The environment is one venv with vLLM (CPU), Megatron and PEFT together, in .venv.

PYTHON ?= python3
PY := .venv/bin/python
# Most of what is installed is never imported, so byte code is left to the first import: a third of
# the time, and 0.4 GB.
PIP := .venv/bin/pip install --quiet --disable-pip-version-check --no-compile \
	--constraint requirements/constraints.txt

EXTENSION_SOURCES := setup.py pyproject.toml $(wildcard csrc/*.* csrc/*/*.*)
CXX_SOURCES := $(shell git ls-files "*.cpp" "*.h" "*.cu" "*.cuh")

.PHONY: venv test lint demo

venv: .venv/built

# Made again only when a requirement changes.
.venv/installed: $(wildcard requirements/*.txt)
	$(PYTHON) -m venv .venv
	$(PIP) -r requirements/base.txt -r requirements/engine.txt \
		-r requirements/megatron.txt -r requirements/dev.txt
# The full dependencies of these conflict with one another and hold gigabytes that are never
# imported here; requirements/unresolved.txt gives the reason for each.
	$(PIP) --no-deps --ignore-requires-python -r requirements/unresolved.txt
	$(PIP) --no-deps -r requirements/cuda.txt
	touch $@

# The kernels are compiled on every machine, with or without a GPU.
# Without isolation the build uses the pinned setuptools and pybind11 instead of fetching others.
.venv/built: .venv/installed $(EXTENSION_SOURCES)
	LORA_REFIT_CUDA=1 $(PIP) --no-build-isolation --no-deps --editable .
	touch $@

test: venv
	$(PY) -m pytest -q tests

lint: venv
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy
	.venv/bin/clang-format --dry-run -Werror $(CXX_SOURCES)

# A GRPO run on SmolLM2-135M: Megatron trains, vLLM rolls out, every step refits. It ends once three
# steps average to a reward of 0.9, or after 25.
demo: venv
	$(PY) -m lora_refit.grpo --stop-reward 0.9 --output out/demo
