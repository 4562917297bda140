"""The copy kernel against a plain torch execution of the same block list, bit for bit."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from block_reference import (
    BITS,
    Blocks,
    Buffer,
    block,
    digest_of_memory,
    execute,
    poisoned,
    program_of,
    random_values,
    run,
    same_bits,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_refit.kernels import BLOCK_DTYPE, DTYPE_CODES, SCALE_ONCE, ZERO_FILL

DTYPES = list(DTYPE_CODES)
PAIRS = [(src, dst) for src in DTYPES for dst in DTYPES]
SIMD_PATHS = ["auto", "portable"]


@pytest.fixture(autouse=True, scope="module")
def one_torch_thread() -> Iterator[None]:
    """The reference works on small tensors, which torch's own threads only slow down."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


SIZES = st.one_of(st.integers(0, 3), st.sampled_from([1, 1, 4, 7, 8, 15, 16, 17, 33, 64]))
LONG_SIZES = st.one_of(SIZES, st.integers(1000, 5000))


@st.composite
def block_lists(
    draw: st.DrawFn, src_dtypes: list[torch.dtype], dst_dtypes: list[torch.dtype]
) -> tuple[Blocks, list[torch.Tensor], list[torch.Tensor]]:
    """Block lists whose destinations do not overlap, and buffers that just contain them."""
    rows = []
    src_needed = [1] * len(src_dtypes)
    dst_needed = [1] * len(dst_dtypes)
    for _ in range(draw(st.integers(1, 6))):
        size = (draw(st.integers(0, 3)), draw(SIZES), draw(LONG_SIZES))
        order = draw(st.permutations(range(3)))
        size = tuple(size[axis] for axis in draw(st.permutations(range(3))))
        src = draw(st.integers(ZERO_FILL, len(src_dtypes) - 1))
        dst = draw(st.integers(0, len(dst_dtypes) - 1))

        dst_stride, extent = _nested_strides(size, order, draw(st.sampled_from([0, 0, 1, 5])))
        dst_stride, dst_first = _with_signs(size, dst_stride, draw(st.sampled_from([1, 1, -1])))
        dst_offset = dst_needed[dst] + draw(st.integers(0, 3)) + dst_first
        dst_needed[dst] = dst_offset - dst_first + extent + draw(st.integers(0, 3))

        src_stride, _ = _nested_strides(size, order, draw(st.sampled_from([0, 0, 2])))
        if draw(st.booleans()):
            src_stride = [draw(st.sampled_from([-9, -1, 0, 1, 1, 2, 17])) for _ in range(3)]
        lowest = sum(min(0, (n - 1) * s) for n, s in zip(size, src_stride, strict=True) if n)
        highest = sum(max(0, (n - 1) * s) for n, s in zip(size, src_stride, strict=True) if n)
        src_offset = draw(st.integers(0, 3)) - lowest
        if src != ZERO_FILL:
            src_needed[src] = max(src_needed[src], src_offset + highest + 1)

        scale = draw(st.sampled_from([1.0, 1.0, 2.0, -0.3, 1.7e-3, 0.0]))
        flags = draw(st.sampled_from([0, SCALE_ONCE]))
        rows.append((src, dst, src_offset, dst_offset, size, src_stride, dst_stride, scale, flags))
    seed = draw(st.integers(0, 2**31))
    sources = [
        random_values(dtype, count, seed + i)
        for i, (dtype, count) in enumerate(zip(src_dtypes, src_needed, strict=True))
    ]
    destinations = [
        poisoned(dtype, count) for dtype, count in zip(dst_dtypes, dst_needed, strict=True)
    ]
    return np.array(rows, BLOCK_DTYPE), sources, destinations


def _nested_strides(size: tuple[int, ...], order: list[int], gap: int) -> tuple[list[int], int]:
    """Strides of a box laid out with `order[-1]` innermost, and the elements it spans."""
    strides, step = [0, 0, 0], 1
    for axis in reversed(order):
        strides[axis] = step
        step = step * max(1, size[axis]) + gap
    return strides, step


def _with_signs(size: tuple[int, ...], strides: list[int], row_sign: int) -> tuple[list[int], int]:
    """Counts the rows downwards where `row_sign` is -1; also where the first element then is."""
    if row_sign == 1 or size[1] == 0:
        return strides, 0
    return [strides[0], -strides[1], strides[2]], (size[1] - 1) * strides[1]


@pytest.mark.parametrize("simd", SIMD_PATHS)
@pytest.mark.parametrize(("src_dtype", "dst_dtype"), PAIRS)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_random_block_lists_equal_torch(
    simd: str, src_dtype: torch.dtype, dst_dtype: torch.dtype, data: st.DataObject
) -> None:
    """Any strides, sizes and scales, cut at any size, on one thread and three.

    Values, untouched bytes around them, and the digest are checked.
    """
    other = data.draw(st.sampled_from(DTYPES))
    blocks, source_tensors, destination_tensors = data.draw(
        block_lists([src_dtype, other], [dst_dtype, src_dtype])
    )
    sources = [Buffer(tensor, data.draw(st.integers(0, 5))) for tensor in source_tensors]
    destinations = [Buffer(tensor, data.draw(st.integers(0, 5))) for tensor in destination_tensors]
    expected = execute(blocks, source_tensors, destination_tensors)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LORA_REFIT_SIMD", simd)
        tile_bytes = data.draw(st.sampled_from([16, 500, 1 << 17]))
        program = program_of(blocks, sources, destinations, tile_bytes)
        digests = run(program, sources, destinations, data.draw(st.sampled_from([1, 3])))

        for destination, wanted in zip(destinations, expected, strict=True):
            assert same_bits(destination.read(), wanted)
            assert destination.outside_is_untouched()
        on_zeros = [Buffer(torch.zeros_like(tensor)) for tensor in destination_tensors]
        assert run(program, sources, on_zeros) == digests == digest_of_memory(on_zeros)


def hard_to_round(dtype: torch.dtype) -> torch.Tensor:
    """Every 16-bit pattern; as fp32 also each midpoint of bf16 and fp16 and its two neighbours."""
    patterns = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    if dtype != torch.float32:
        return patterns.view(dtype)
    high = patterns.to(torch.int32) << 16
    around_bf16 = torch.cat([high + low for low in (0, 1, 0x7FFF, 0x8000, 0x8001)])
    halves = patterns.view(torch.float16).float().view(torch.int32)
    around_f16 = torch.cat([halves + low for low in (0, 1, 0x0FFF, 0x1000, 0x1001, 0x1FFF)])
    subnormal_midpoints = ((torch.arange(2048).float() + 0.5) * 2.0**-24).view(torch.int32)
    return torch.cat([around_bf16, around_f16, subnormal_midpoints]).view(torch.float32)


@pytest.mark.parametrize("simd", SIMD_PATHS)
@pytest.mark.parametrize(("src_dtype", "dst_dtype"), PAIRS)
def test_every_rounding_equals_torch(
    simd: str,
    src_dtype: torch.dtype,
    dst_dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All patterns of both 16-bit dtypes and all midpoints of fp32, for each kind of scaling."""
    monkeypatch.setenv("LORA_REFIT_SIMD", simd)
    values = hard_to_round(src_dtype)
    count = values.numel()
    for scale, flags in [(1.0, 0), (0.1, 0), (0.1, SCALE_ONCE), (-256.0, 0)]:
        blocks = block((1, 1, count), (0, 0, 1), (0, 0, 1), scale=scale, flags=flags)
        source, target = Buffer(values), Buffer(poisoned(dst_dtype, count))
        run(program_of(blocks, [source], [target]), [source], [target])
        (expected,) = execute(blocks, [values], [target.tensor])
        assert same_bits(target.read(), expected), f"scale {scale}, flags {flags}"
        if src_dtype == dst_dtype and scale == 1.0:
            assert torch.equal(target.read().view(BITS[dst_dtype]), values.view(BITS[src_dtype]))


@pytest.mark.parametrize(("src_dtype", "dst_dtype"), PAIRS)
def test_simd_paths_agree_on_nan_payloads(
    src_dtype: torch.dtype, dst_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two hosts with different CPUs must compute the same digest, NaNs included."""
    values = hard_to_round(src_dtype)
    blocks = block((1, 1, len(values)), (0, 0, 1), (0, 0, 1), scale=0.7)
    digests = []
    for simd in SIMD_PATHS:
        monkeypatch.setenv("LORA_REFIT_SIMD", simd)
        source, target = Buffer(values), Buffer(poisoned(dst_dtype, len(values)))
        digests.append(run(program_of(blocks, [source], [target]), [source], [target]))
    assert digests[0] == digests[1]


def test_once_and_twice_rounded_scales_differ() -> None:
    """The control of SCALE_ONCE: ignoring the flag would fail the comparison with torch."""
    values = random_values(torch.float32, 4096, seed=3)
    results = []
    for flags in (0, SCALE_ONCE):
        blocks = block((1, 1, 4096), (0, 0, 1), (0, 0, 1), scale=1.3, flags=flags)
        source, target = Buffer(values), Buffer(poisoned(torch.bfloat16, 4096))
        run(program_of(blocks, [source], [target]), [source], [target])
        results.append(target.read())
    assert not same_bits(results[0], results[1])


def test_digest_catches_a_wrong_plan() -> None:
    """Dropping a block, swapping two sources, shifting one and rescaling one change the digest."""
    values = random_values(torch.bfloat16, 600, seed=4)
    rows = [
        block((1, 10, 20), (0, 20, 1), (0, 20, 1), src_offset=200 * i, dst_offset=200 * i)
        for i in range(3)
    ]
    right = np.concatenate(rows)
    swapped, shifted, rescaled = right.copy(), right.copy(), right.copy()
    swapped["src_offset"][[0, 1]] = right["src_offset"][[1, 0]]
    shifted["src_offset"][2] -= 1
    rescaled["scale"][1] = 0.5
    source = Buffer(values)

    def digest_of(blocks: Blocks) -> list[int]:
        target = Buffer(poisoned(torch.bfloat16, 600))
        return run(program_of(blocks, [source], [target]), [source], [target])

    control = digest_of(right[::-1])
    assert digest_of(right) == control
    mutants = [right[1:], swapped, shifted, rescaled]
    assert all(digest_of(mutant) != control for mutant in mutants)


def large_case() -> tuple[Blocks, list[Buffer], list[Buffer]]:
    """Two rank shards of lora_B rows, interleaved into a padded slot: several tiles of 128 KiB."""
    values = [random_values(torch.float32, 20_000 * 16, seed=i) for i in range(2)]
    blocks = np.concatenate(
        [
            block((1, 20_000, 16), (0, 16, 1), (0, 64, 1), src=i, dst_offset=32 * i, scale=0.5)
            for i in range(2)
        ]
    )
    return blocks, [Buffer(v) for v in values], [Buffer(poisoned(torch.bfloat16, 20_000 * 64))]


def test_threads_do_not_change_anything() -> None:
    """One, two, three and the default number of threads write the same bytes and digest."""
    blocks, sources, targets = large_case()
    program = program_of(blocks, sources, targets)
    assert program.tile_count > 4
    digests = run(program, sources, targets)
    written = targets[0].memory.copy()
    for threads in (0, 2, 3):
        again = [Buffer(targets[0].tensor)]
        assert run(program, sources, again, threads) == digests
        assert np.array_equal(again[0].memory, written)


def test_concurrent_runs_of_one_program() -> None:
    """Four Python threads run one program into their own destinations."""
    blocks, sources, targets = large_case()
    program = program_of(blocks, sources, targets)
    expected = run(program, sources, targets)
    results: list[list[int]] = []

    def repeat() -> None:
        mine = [Buffer(targets[0].tensor)]
        results.extend(run(program, sources, mine, threads=2) for _ in range(5))

    threads = [threading.Thread(target=repeat) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [expected] * 20


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_child_gets_its_own_threads() -> None:
    """The parent has run with helper threads; its forked child does too, and both go on."""
    blocks, sources, targets = large_case()
    program = program_of(blocks, sources, targets)
    expected = run(program, sources, targets, threads=3)

    def child() -> None:
        if run(program, sources, targets, threads=3) != expected:
            raise SystemExit(3)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(timeout=30)
    hung = process.is_alive()
    process.kill()
    assert not hung
    assert process.exitcode == 0
    assert run(program, sources, targets, threads=3) == expected
