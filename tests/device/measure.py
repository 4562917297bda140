"""Times the kernels on the GPU against its own copy bandwidth and against plain torch.

python tests/device/measure.py FOLDER    writes FOLDER/device.json and FOLDER/device.md
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_buffers import DEVICE
from llama import LAYERS, factor_shapes, merge_plan, modules, pack_blocks

from lora_refit.kernels import BufferType, CopyKernel, MergeKernel

RANKS = (8, 16, 32, 64, 128)
REPETITIONS = 9
EAGER_LAYERS = 4
Row = dict[str, Any]


def gpu_ms(work: Callable[[], object]) -> float:
    """Median time between events around `work`, in milliseconds, after two warm-ups."""
    times = []
    for repetition in range(REPETITIONS + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        if repetition >= 2:
            times.append(begin.elapsed_time(end))
    return statistics.median(times)


def host_ms(work: Callable[[], object]) -> float:
    """Median time that the host spends in `work`, with an idle GPU before it."""
    times = []
    for _ in range(REPETITIONS):
        torch.cuda.synchronize()
        started = time.perf_counter()
        work()
        times.append((time.perf_counter() - started) * 1e3)
    return statistics.median(times)


def copy_bandwidth() -> float:
    """Bytes read and written per second by torch's copy of 8 GiB."""
    source = torch.empty(8 << 30, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.numel() / gpu_ms(lambda: target.copy_(source)) * 1e3


def flat_views(flat: torch.Tensor, shapes: list[tuple[int, int]]) -> list[torch.Tensor]:
    sizes = [rows * cols for rows, cols in shapes]
    parts = flat[: sum(sizes)].split(sizes)
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def measure_copy(rank: int, dtype: torch.dtype, bandwidth: float) -> Row:
    """Packs all factors of a Llama-8B adapter, each into its place in one buffer."""
    shapes = factor_shapes(rank)
    numels = [rows * cols for rows, cols in shapes]
    factors = [torch.randn(shape, device=DEVICE).to(dtype) for shape in shapes]
    packed = torch.empty(sum(numels), dtype=torch.bfloat16, device=DEVICE)
    views = flat_views(packed, shapes)
    kernel = CopyKernel(
        pack_blocks(numels),
        [BufferType(dtype, numel) for numel in numels],
        [BufferType(torch.bfloat16, numel) for numel in numels],
        DEVICE,
    )
    src = np.asarray([tensor.data_ptr() for tensor in factors], np.uint64)
    dst = np.asarray([view.data_ptr() for view in views], np.uint64)
    ours = gpu_ms(lambda: kernel.launch(src, dst))
    moved = sum(numels) * (dtype.itemsize + 2)

    def copy_loop() -> None:
        for view, factor in zip(views, factors, strict=True):
            view.copy_(factor)

    def cat_and_cast() -> None:
        packed.copy_(torch.cat([factor.flatten() for factor in factors]))

    return {
        "kernel": "copy",
        "rank": rank,
        "adapter": str(dtype).removeprefix("torch."),
        "bytes": moved,
        "ms": ours,
        "of_copy_bandwidth": moved / ours * 1e3 / bandwidth,
        "launches": 1,
        "host_ms_with_wait": host_ms(lambda: kernel.run(src, dst)),
        "host_ms_without_wait": host_ms(lambda: kernel.launch(src, dst)),
        "torch copy_ loop": gpu_ms(copy_loop) / ours,
        "torch _foreach_copy_": gpu_ms(lambda: torch._foreach_copy_(views, factors)) / ours,
        "torch cat, copy_": gpu_ms(cat_and_cast) / ours,
    }


def measure_merge(rank: int, adapter: torch.dtype, bandwidth: float) -> Row:
    """Merges all linear layers of Llama-8B into a second copy of the weights."""
    items = modules()
    weight_bytes = 2 * sum(item.rows * item.cols for item in items)
    weights = flat_views(
        torch.randn(weight_bytes // 2, dtype=torch.bfloat16, device=DEVICE),
        [(item.rows, item.cols) for item in items],
    )
    merged = [torch.empty_like(weight) for weight in weights]
    sources, factors = [], []
    for item, weight in zip(items, weights, strict=True):
        b = (0.01 * torch.randn(item.rows, rank, device=DEVICE)).to(adapter)
        a = (0.01 * torch.randn(rank, item.cols, device=DEVICE)).to(adapter)
        factors.append((b, a))
        sources += [weight, b, a]
    plan = merge_plan(items, rank, 2.0, torch.bfloat16, adapter)
    kernel = MergeKernel(
        plan.blocks, plan.segments, plan.sources, plan.destinations, len(items), DEVICE
    )
    ours = gpu_ms(lambda: kernel.merge(sources, merged))
    moved = 2 * weight_bytes

    def eager() -> None:
        few = EAGER_LAYERS * len(items) // LAYERS
        for weight, (b, a), out in zip(weights[:few], factors[:few], merged[:few], strict=True):
            out.copy_(weight.float() + 2.0 * (b.float() @ a.float()))

    return {
        "kernel": "merge",
        "rank": rank,
        "adapter": str(adapter).removeprefix("torch."),
        "bytes": moved,
        "ms": ours,
        "of_copy_bandwidth": moved / ours * 1e3 / bandwidth,
        "launches": 1,
        "eager fp32 merge": gpu_ms(eager) * LAYERS / EAGER_LAYERS / ours,
    }


def table(rows: list[Row], bandwidth: float, gpu: str) -> str:
    baselines = ("torch copy_ loop", "torch _foreach_copy_", "torch cat, copy_", "eager fp32 merge")
    lines = [
        f"{gpu}, torch {torch.__version__}. torch's own copy moves {bandwidth / 1e12:.2f} TB/s, "
        "bytes read and written.",
        "Llama-3.1-8B shapes; times are medians; baselines are multiples of lora_refit's time.",
        "",
        "| kernel | rank | A, B | ms | of copy bandwidth | host ms | "
        + " | ".join(baselines)
        + " |",
        "|---" * (6 + len(baselines)) + "|",
    ]
    for row in rows:
        host = f"{row['host_ms_without_wait']:.3f}" if "host_ms_without_wait" in row else ""
        times = [f"{row[name]:.1f}" if name in row else "" for name in baselines]
        lines.append(
            f"| {row['kernel']} | {row['rank']} | {row['adapter']} | {row['ms']:.3f} "
            f"| {row['of_copy_bandwidth']:.2f} | {host} | {' | '.join(times)} |"
        )
    return "\n".join(lines) + "\n"


def main(folder: Path) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    gpu, bandwidth = torch.cuda.get_device_name(DEVICE), copy_bandwidth()
    torch.cuda.empty_cache()
    rows = [
        measure_copy(rank, dtype, bandwidth)
        for dtype in (torch.bfloat16, torch.float32)
        for rank in RANKS
    ]
    for adapter, ranks in ((torch.bfloat16, RANKS), (torch.float32, (16, 64))):
        for rank in ranks:
            rows.append(measure_merge(rank, adapter, bandwidth))
            torch.cuda.empty_cache()
    result = {"gpu": gpu, "torch": torch.__version__, "copy_bytes_per_s": bandwidth, "rows": rows}
    (folder / "device.json").write_text(json.dumps(result, indent=1))
    text = table(rows, bandwidth, gpu)
    (folder / "device.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
