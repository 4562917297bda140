"""The merge kernels' PTX, simulated: within the bound of merge_reference.py, and equal, bit for bit,
to the order of operations that the kernel states."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import ptxsim
import pytest
import shipped
import torch
from block_reference import BITS
from emulated_build import Edit
from merge_cases import DTYPES, Program, layer, random_program
from merge_emulated import Launch
from merge_reference import faults
from merge_simulated import run
from numpy.typing import NDArray

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
KERNELS = {
    F32: "lora_refit_merge_f32",
    F16: "lora_refit_merge_f16",
    BF16: "lora_refit_merge_bf16",
}
LAUNCH = Launch(grid=2, thread_blocks=3)


def kernel(adapter: torch.dtype) -> ptxsim.Kernel:
    return shipped.kernel(KERNELS[adapter], "merge.cu")


@pytest.mark.parametrize("adapter", DTYPES, ids=str)
def test_random_programs(adapter: torch.dtype) -> None:
    """Shards along rows, columns or K, strided factors, all dtypes of W and W'."""
    program = random_program(adapter, 8, seed=11, most_products=100_000)
    assert faults(program, run(kernel(adapter), program, LAUNCH)) == []


@pytest.mark.parametrize("adapter", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("size", "rank", "misaligned"), [((130, 136), 40, 0), ((40, 72), 150, 0), ((65, 31), 5, 1)]
)
def test_products_are_summed_in_the_order_of_k(
    adapter: torch.dtype, size: tuple[int, int], rank: int, misaligned: int
) -> None:
    """Aligned and over both halves of a strip; more than one K-block; element by element."""
    program = layer(adapter, BF16, F32, size, rank, scale=0.3, misaligned=misaligned)
    result = run(kernel(adapter), program, LAUNCH)
    assert faults(program, result) == []
    assert same_bits(result.destinations[0].read(), modelled(program))


@pytest.mark.parametrize("merged", DTYPES, ids=str)
def test_sums_are_rounded_once(merged: torch.dtype) -> None:
    """To the dtype of W', from the sum in fp32."""
    program = layer(BF16, F32, merged, (40, 136), 16, scale=0.3)
    result = run(kernel(BF16), program, LAUNCH)
    assert same_bits(result.destinations[0].read(), modelled(program).to(merged))


def same_bits(got: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.equal(got.view(BITS[got.dtype]), expected.reshape(-1).view(BITS[got.dtype]))


def modelled(program: Program) -> torch.Tensor:
    """W + scale * B @ A in fp32 for a `layer`: K in steps of one mma, whose exact sum is rounded
    once by the simulator; of fp32 factors three mma a step, the largest terms last."""
    (block,), (segment,) = program.blocks, program.segments
    rows, cols, rank = (int(n) for n in (block["rows"], block["cols"], segment["rank"]))
    b = _matrix(program, segment["b"], segment["b_offset"], (rows, rank))
    a = _matrix(program, segment["a"], segment["a_offset"], (rank, cols))
    weight = _matrix(program, block["weight"], block["weight_offset"], (rows, cols))
    is_f32 = program.sources[segment["b"]].tensor.dtype == F32
    sums = np.zeros((rows, cols), np.float32)
    step = 8 if is_f32 else 16
    for k in range(0, rank, step):
        b_part, a_part = b[:, k : k + step], a[k : k + step]
        for left, right in _tf32_terms(b_part, a_part) if is_f32 else [(b_part, a_part)]:
            exact = left.astype(np.float64) @ right.astype(np.float64)
            sums = (exact + sums).astype(np.float32)
    merged = weight.astype(np.float64) + np.float64(block["scale"]) * sums  # as one fma
    return torch.from_numpy(merged.astype(np.float32))


def _matrix(
    program: Program, buffer: int, offset: int, size: tuple[int, int]
) -> NDArray[np.float32]:
    """Of a matrix that lies row by row."""
    count = size[0] * size[1]
    return program.sources[buffer].tensor[offset : offset + count].float().numpy().reshape(size)


Term = tuple[NDArray[np.float32], NDArray[np.float32]]


def _tf32_terms(b: NDArray[np.float32], a: NDArray[np.float32]) -> list[Term]:
    (b_big, b_small), (a_big, a_small) = _split(b), _split(a)
    return [(b_small, a_big), (b_big, a_small), (b_big, a_big)]


def _split(values: NDArray[np.float32]) -> Term:
    """The nearest tf32, ties away from zero; and what is left, cut off below tf32."""
    bits, below = np.ascontiguousarray(values).view(np.uint32), np.uint32(0x1FFF)
    big = ((bits + np.uint32(0x1000)) & ~below).view(np.float32)
    return big, ((values - big).view(np.uint32) & ~below).view(np.float32)


@dataclass(frozen=True)
class Fault:
    """An edit of the PTX that a wrapper emits, or of what lies between; how it shows in `layer`s of
    a factor dtype: as a wrong result, or as an error of the simulator."""

    name: str
    edit: Edit
    adapter: torch.dtype = BF16
    error: str = ""


FAULTS = [
    Fault(
        "fragments of A are not transposed",
        Edit("ptx.cuh", "m8n8.x4.trans.shared.b16 {%0", "m8n8.x4.shared.b16 {%0"),
    ),
    Fault(
        "two registers of a fragment are exchanged",
        Edit(
            "ptx.cuh",
            '"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "\n'
            '      "{%0, %1, %2, %3}, {%4, %5, %6, %7}',
            '"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "\n'
            '      "{%0, %1, %2, %3}, {%4, %6, %5, %7}',
        ),
    ),
    Fault(
        "bits below tf32 are left in an operand",
        Edit("merge_multiply.cuh", "bits_of_float(left) & kTf32", "bits_of_float(left)"),
        F32,
        error="not rounded",
    ),
]  # fmt: skip


@pytest.fixture(scope="module")
def faulty_ptx(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Future[Path]]:
    """PTX of each edited source, compiled in the background."""

    def compile_edited(fault: Fault) -> Path:
        folder = tmp_path_factory.mktemp("edited")
        (folder / "cuda").mkdir()
        edited = folder / "cuda" / fault.edit.file
        edited.write_text(fault.edit.text())
        source = shipped.CSRC / "cuda" / "merge.cu"
        source = edited if edited.name == source.name else source
        return shipped.compile_source(source, "-arch=compute_80", "-ptx", include=[folder])

    with ThreadPoolExecutor(max_workers=2) as pool:
        yield {fault.name: pool.submit(compile_edited, fault) for fault in FAULTS}


def test_the_program_that_shows_faults_is_right_without_them() -> None:
    for adapter in (BF16, F32):
        program = fault_program(adapter)
        assert faults(program, run(kernel(adapter), program, LAUNCH)) == []


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_faults_are_noticed(fault: Fault, faulty_ptx: dict[str, Future[Path]]) -> None:
    """By wrong results, or by the simulator."""
    ptx = faulty_ptx[fault.name].result().read_text()
    faulty = ptxsim.parse(ptx)[KERNELS[fault.adapter]]
    program = fault_program(fault.adapter)
    if fault.error:
        with pytest.raises(ptxsim.PtxError, match=fault.error):
            run(faulty, program, LAUNCH)
    else:
        assert faults(program, run(faulty, program, LAUNCH)) != []


def fault_program(adapter: torch.dtype) -> Program:
    return layer(adapter, BF16, BF16, (72, 136), 24)
