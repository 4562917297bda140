"""Block lists that the copy kernel refuses, each beside one that it must accept."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from block_reference import Blocks, Buffer, addresses_of, block, program_of, run

from lora_refit import _C, kernels
from lora_refit.errors import LayoutMismatch, TransportUnavailable, UnsupportedAdapter
from lora_refit.kernels import BLOCK_DTYPE, ZERO_FILL, BufferType

FITS = ((1, 2, 5), (0, 5, 1), (0, 5, 1))


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (block(*FITS, src=2), "source buffer 2 does not exist; there are 1"),
        (block(*FITS, src=-2), "source buffer -2 does not exist"),
        (block(*FITS, dst=1), "destination buffer 1 does not exist"),
        (block(*FITS, dst=-1), "destination buffer -1 does not exist"),
        (block(*FITS, src_offset=1), "source elements 1 to 10 lie outside source buffer 0 of 10"),
        (block(*FITS, dst_offset=3), "destination elements 3 to 12 lie outside"),
        (block(*FITS, src_offset=-1), "source elements -1 to 8 lie outside"),
        (block(*FITS, dst_offset=-1), "destination elements -1 to 8 lie outside"),
        (block((1, 2, 5), (0, -5, 1), (0, 5, 1)), "source elements -5 to 4 lie outside"),
        (block((1, 2, 5), (0, 5, 1), (0, -5, 1)), "destination elements -5 to 4 lie outside"),
        (block((1, 3, 2**62), (0, 2**62, 2), (0, 5, 1)), "elements 0 to .* lie outside"),
        (block((1, 2, 2), (0, 2**63 - 1, 2**63 - 1), (0, 2, 1)), "to more than 2.63 lie outside"),
        (block((1, -2, 5), (0, 5, 1), (0, 5, 1)), "size -2 is negative"),
        (block((1, 2, 5), (0, 5, 1), (0, 0, 1)), "destination stride 0 writes the same elements"),
        (block(*FITS, flags=6), "flags 6 are not known"),
        (block(*FITS, scale=float("nan")), "scale is not a finite number"),
        (block(*FITS, src=ZERO_FILL, dst_offset=1), "destination elements 1 to 10 lie outside"),
    ],
)
def test_bad_blocks_are_refused_by_number(bad: Blocks, reason: str) -> None:
    """The same list without the bad block is accepted, and the error names its number."""
    good = block(*FITS)
    buffers = [BufferType(torch.bfloat16, 10)]
    kernels.CopyKernel(good, buffers, buffers)
    with pytest.raises(LayoutMismatch, match=f"block 1: .*{reason}"):
        kernels.CopyKernel(np.concatenate([good, bad]), buffers, buffers)


def test_blocks_may_reach_both_ends_of_their_buffers() -> None:
    """The control of the bounds check: first and last element, forwards and backwards."""
    buffers = [BufferType(torch.bfloat16, 10)]
    reversed_rows = block((1, 2, 5), (0, -5, -1), (0, -5, 1), src_offset=9, dst_offset=5)
    kernels.CopyKernel(np.concatenate([block(*FITS), reversed_rows]), buffers, buffers)


def test_empty_blocks_may_point_anywhere() -> None:
    """A block of no elements touches nothing, so its offsets are not checked."""
    values = Buffer(torch.ones(4))
    target = Buffer(torch.zeros(4))
    blocks = block((1, 0, 5), (0, 5, 1), (0, 5, 1), src_offset=99, dst_offset=-7)
    program = program_of(blocks, [values], [target])
    assert run(program, [values], [target]) == [0]
    assert (program.block_count, program.tile_count, program.bytes_written) == (1, 0, 0)


def test_missing_address_is_refused() -> None:
    buffers = [BufferType(torch.bfloat16, 10)]
    kernel = kernels.CopyKernel(block(*FITS), buffers, buffers)
    with pytest.raises(LayoutMismatch, match="source buffer 0 has address 0"):
        kernel.run(np.zeros(1, np.uint64), np.ones(1, np.uint64))
    with pytest.raises(LayoutMismatch, match="src_addresses must be a vector of 1 elements"):
        kernel.run(np.zeros(2, np.uint64), np.ones(1, np.uint64))
    assert kernel.launches == 0


def test_unsupported_dtype_and_device_are_named() -> None:
    good = [BufferType(torch.bfloat16, 10)]
    with pytest.raises(UnsupportedAdapter, match=r"source buffer 1 has dtype torch\.int8"):
        kernels.CopyKernel(block(*FITS), [*good, BufferType(torch.int8, 10)], good)
    with pytest.raises(
        TransportUnavailable, match="device meta: lora_refit copies on cpu and cuda"
    ):
        kernels.CopyKernel(block(*FITS), good, good, torch.device("meta"))


def test_kernel_counts_launches_and_bytes() -> None:
    """Runs are counted, and the digest array is the kernel's own."""
    source, target = Buffer(torch.ones(10)), Buffer(torch.zeros(10).bfloat16())
    kernel = kernels.CopyKernel(
        block(*FITS), [BufferType(torch.float32, 10)], [BufferType(torch.bfloat16, 10)]
    )
    first = kernel.run(addresses_of([source]), addresses_of([target]))
    second = kernel.run(addresses_of([source]), addresses_of([target]))
    assert first is second
    assert kernel.launches == 2
    assert kernel.bytes_written == 20
    assert torch.equal(target.read(), torch.ones(10).bfloat16())


def test_block_layout_is_the_same_in_python_and_cpp() -> None:
    layout = _C.block_layout()
    assert layout.pop("sizeof") == BLOCK_DTYPE.itemsize
    assert BLOCK_DTYPE.fields is not None
    assert layout == {name: field[1] for name, field in BLOCK_DTYPE.fields.items()}


@pytest.mark.parametrize(
    ("variable", "value"), [("LORA_REFIT_SIMD", "sse9"), ("LORA_REFIT_THREADS", "many")]
)
def test_bad_environment_is_refused(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error quotes the variable and its value; with the variable unset, all is well."""
    large = [BufferType(torch.float32, 1 << 18)]
    blocks = block((1, 1, 1 << 18), (0, 0, 1), (0, 0, 1))
    source, target = Buffer(torch.ones(1 << 18)), Buffer(torch.zeros(1 << 18))

    def copy() -> None:
        kernel = kernels.CopyKernel(blocks, large, large)
        kernel.run(addresses_of([source]), addresses_of([target]))

    copy()
    monkeypatch.setenv(variable, value)
    with pytest.raises(TransportUnavailable, match=f"{variable}={value}"):
        copy()
