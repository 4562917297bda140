"""Programs of the CUDA backend, on the stand-in driver, against the CPU's."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import stand_in
import torch
from block_reference import Blocks, Buffer, addresses_of, block, poisoned, program_of, run
from copy_cases import Case, random_plans
from merge_cases import Program, random_program
from merge_reference import Result, faults
from numpy.typing import NDArray

from lora_refit import _C
from lora_refit.kernels import DTYPE_CODES, MERGE_SUMS_DTYPE

cuda = _C.cuda


@pytest.fixture(autouse=True)
def driver() -> Iterator[stand_in.StandIn]:
    with stand_in.nothing_left_over() as driver:
        yield driver


def codes(buffers: list[Buffer]) -> list[int]:
    return [DTYPE_CODES[buffer.tensor.dtype] for buffer in buffers]


def sizes(buffers: list[Buffer]) -> list[int]:
    return [buffer.tensor.numel() for buffer in buffers]


def cuda_program(
    blocks: Blocks, sources: list[Buffer], destinations: list[Buffer], device: int = 0
) -> _C.cuda.CopyProgram:
    return cuda.CopyProgram(
        device,
        blocks.tobytes(),
        codes(sources),
        sizes(sources),
        codes(destinations),
        sizes(destinations),
    )


def run_cuda(
    program: _C.cuda.CopyProgram,
    sources: list[Buffer],
    destinations: list[Buffer],
    stream: int = 0,
) -> list[int]:
    digests = np.full(len(destinations), 99, np.uint64)
    program.run(addresses_of(sources), addresses_of(destinations), digests, stream)
    return [int(value) for value in digests]


class Row:
    """A program that copies one row of numbers, and its expected digests."""

    def __init__(self, first: float, count: int = 3000) -> None:
        self.blocks = block((1, 1, count), (0, 0, 1), (0, 0, 1))
        self.source = Buffer(torch.arange(count, dtype=torch.float32) + first)
        self.target = Buffer(poisoned(torch.bfloat16, count))
        self.expected = run(
            program_of(self.blocks, [self.source], [self.target]), [self.source], [self.target]
        )
        self.values = self.target.read()
        self.clear()

    def program(self, device: int = 0) -> _C.cuda.CopyProgram:
        return cuda_program(self.blocks, [self.source], [self.target], device)

    @property
    def addresses(self) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        return addresses_of([self.source]), addresses_of([self.target])

    def clear(self) -> None:
        self.target.memory[:] = 0x5A

    def arrived(self) -> bool:
        return bool(torch.equal(self.target.read(), self.values))


@pytest.mark.parametrize(("seed", "device"), [(1, 0), (2, 1), (3, 0)])
def test_copies_equal_the_cpu_kernel(seed: int, device: int) -> None:
    """Random block lists: every bit written, every byte around, digests and traffic."""
    case: Case = random_plans(30, seed)
    on_cpu, on_gpu = case.fresh_destinations(), case.fresh_destinations()
    expected = program_of(case.blocks, case.sources, on_cpu)
    program = cuda_program(case.blocks, case.sources, on_gpu, device)
    assert run_cuda(program, case.sources, on_gpu) == run(expected, case.sources, on_cpu)
    for got, wanted in zip(on_gpu, on_cpu, strict=True):
        assert (got.storage == wanted.storage).all()
    for fact in ("block_count", "bytes_read", "bytes_written"):
        assert getattr(program, fact) == getattr(expected, fact)


@pytest.mark.parametrize("adapter", list(DTYPE_CODES))
def test_merges_are_within_their_bound(adapter: torch.dtype) -> None:
    """Random weights, factors, shards and layouts: values, digests and fidelity sums."""
    program = random_program(adapter, modules=5, seed=4, most_products=60_000)
    result = merge(program)
    assert faults(program, result) == []


def merge(program: Program) -> Result:
    on_gpu = cuda.MergeProgram(
        0,
        program.blocks.tobytes(),
        program.segments.tobytes(),
        codes(program.sources),
        sizes(program.sources),
        codes(program.destinations),
        sizes(program.destinations),
        program.modules,
    )
    destinations = program.fresh_destinations()
    digests = np.full(len(destinations), 99, np.uint64)
    sums = np.full(program.modules, 99, MERGE_SUMS_DTYPE)
    for _ in range(2):  # the second run must not add to the first
        on_gpu.run(addresses_of(program.sources), addresses_of(destinations), digests, sums, 0)
    return Result(destinations, [int(digest) for digest in digests], sums)


def test_a_run_is_one_launch_and_allocates_nothing(driver: stand_in.StandIn) -> None:
    row = Row(1.0)
    program = row.program()
    assert run_cuda(program, [row.source], [row.target]) == row.expected
    driver.take_calls()
    for _ in range(3):
        row.clear()
        assert run_cuda(program, [row.source], [row.target]) == row.expected
        assert row.arrived()
        assert driver.take_calls() == stand_in.STEADY_RUN


def test_addresses_are_uploaded_when_they_change_and_only_then(driver: stand_in.StandIn) -> None:
    row, moved = Row(1.0), Row(5.0)
    program = row.program()
    uploads = []
    for which in (row, row, moved, moved, row):
        driver.take_calls()
        assert run_cuda(program, [which.source], [which.target]) == which.expected
        assert which.arrived()
        uploads.append(driver.take_calls().count("cuMemcpyHtoDAsync"))
    assert uploads == [1, 0, 1, 0, 1]


def test_launches_on_other_streams_follow_each_other() -> None:
    """Each is put off until somebody waits, so only the program itself keeps them in order."""
    row, moved = Row(1.0), Row(5.0)
    program = row.program()
    first, second = cuda.Stream(0), cuda.Stream(0)
    digests = np.zeros(1, np.uint64)
    program.launch(*row.addresses, first.handle)
    program.launch(*row.addresses, second.handle)
    assert not row.arrived()
    program.collect(digests)
    assert row.arrived() and list(digests) == row.expected

    row.clear()
    program.launch(*row.addresses, first.handle)
    program.launch(*moved.addresses, second.handle)  # may not overtake the first's addresses
    program.collect(digests)
    assert row.arrived() and moved.arrived() and list(digests) == moved.expected


def test_events_and_streams_wait() -> None:
    row = Row(1.0)
    program, stream, event = row.program(), cuda.Stream(0), cuda.Event(0)
    for wait in (lambda: cuda.synchronize(0, stream.handle), event.synchronize):
        row.clear()
        program.launch(*row.addresses, stream.handle)
        event.record(stream.handle)
        assert not row.arrived()
        wait()
        assert row.arrived() and event.done
    program.launch(*row.addresses, stream.handle)
    event.record(stream.handle)
    assert not event.done
    while not event.done:
        pass
    assert row.arrived()


def test_a_captured_launch_is_replayed() -> None:
    """The graph reads the address table when it runs: runs in between may move the buffers."""
    row, moved = Row(1.0), Row(5.0)
    program, stream = row.program(), cuda.Stream(0)
    digests = np.zeros(1, np.uint64)
    run_cuda(program, [row.source], [row.target], stream.handle)
    cuda.begin_capture(0, stream.handle)
    assert cuda.is_capturing(0, stream.handle)
    program.launch(*row.addresses, stream.handle)
    graph = cuda.end_capture(0, stream.handle)
    assert not cuda.is_capturing(0, stream.handle)

    for expected in (row, row, moved):
        if expected is moved:
            run_cuda(program, [moved.source], [moved.target], stream.handle)
        row.clear()
        moved.clear()
        digests[:] = 99
        graph.launch(stream.handle)
        assert not expected.arrived()
        cuda.synchronize(0, stream.handle)
        program.collect(digests)
        assert expected.arrived() and list(digests) == expected.expected
    graph.close()


def test_what_cannot_be_captured_is_refused() -> None:
    row, moved = Row(1.0), Row(5.0)
    program, stream, other = row.program(), cuda.Stream(0), cuda.Stream(0)
    cuda.begin_capture(0, stream.handle)
    with pytest.raises(ValueError, match="run once before capturing"):
        program.launch(*row.addresses, stream.handle)
    cuda.end_capture(0, stream.handle).close()

    program.launch(*row.addresses, other.handle)
    cuda.begin_capture(0, stream.handle)
    with pytest.raises(ValueError, match="run once before capturing"):
        program.launch(*moved.addresses, stream.handle)
    with pytest.raises(ValueError, match="collect the last launch before capturing"):
        program.launch(*row.addresses, stream.handle)
    with pytest.raises(ValueError, match=r"run\(\) waits"):
        run_cuda(program, [row.source], [row.target], stream.handle)
    cuda.end_capture(0, stream.handle).close()
    program.collect(np.zeros(1, np.uint64))


def test_nothing_to_collect() -> None:
    with pytest.raises(ValueError, match="no launch to collect"):
        Row(1.0).program().collect(np.zeros(1, np.uint64))


def test_a_program_may_go_while_its_launch_is_under_way() -> None:
    row, stream = Row(1.0), cuda.Stream(0)
    program = row.program()
    program.launch(*row.addresses, stream.handle)
    del program
    assert row.arrived()


def test_empty_programs_run(driver: stand_in.StandIn) -> None:
    empty = Buffer(poisoned(torch.float32, 7))
    for destinations in ([], [empty]):
        program = cuda_program(block((0, 1, 1), (0, 0, 1), (0, 0, 1))[:0], [], destinations)
        assert run_cuda(program, [], destinations) == [0] * len(destinations)
    assert "cuLaunchKernel" not in driver.take_calls()


def test_threads_may_use_programs_at_once() -> None:
    """Each thread its own program, and all of them one that they share."""
    rows = [Row(float(i)) for i in range(3)]
    shared, shared_program = Row(9.0), Row(9.0).program()
    wrong: list[object] = []

    def work(row: Row) -> None:
        program = row.program()
        for _ in range(5):
            got = run_cuda(program, [row.source], [row.target])
            also = run_cuda(shared_program, [shared.source], [shared.target])
            if got != row.expected or not row.arrived() or also != shared.expected:
                wrong.append(got)

    threads = [threading.Thread(target=work, args=(row,)) for row in rows]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


BAD_BLOCKS = [
    block((1, 1, 11), (0, 0, 1), (0, 0, 1)),
    block((1, 1, 10), (0, 0, -1), (0, 0, 1)),
    block((1, 1, 10), (0, 0, 1), (0, 0, 0)),
    block((1, -1, 10), (0, 0, 1), (0, 0, 1)),
    block((1, 1, 1), (0, 0, 1), (0, 0, 1), src=3),
    block((1, 1, 1), (0, 0, 1), (0, 0, 1), dst=-1),
    block((1, 1, 1), (0, 0, 1), (0, 0, 1), flags=6),
    block((1, 1, 1), (0, 0, 1), (0, 0, 1), scale=float("nan")),
]


def refusal(make: object, *arguments: object) -> str:
    with pytest.raises(ValueError) as caught:
        make(*arguments)  # type: ignore[operator]
    return str(caught.value)


def test_bad_programs_are_refused_as_on_the_cpu() -> None:
    arguments = [([0], [10], [0], [10])] * len(BAD_BLOCKS)
    cases = [(blocks.tobytes(), *rest) for blocks, rest in zip(BAD_BLOCKS, arguments, strict=True)]
    cases += [
        (b"odd", [0], [10], [0], [10]),
        (b"", [0, 1], [10], [0], [10]),
        (b"", [7], [10], [0], [10]),
        (b"", [0], [-1], [0], [10]),
    ]
    for case in cases:
        assert refusal(cuda.CopyProgram, 0, *case) == refusal(_C.CopyProgram, *case)
    assert "CUDA device 2 does not exist; there are 2" in refusal(cuda.CopyProgram, 2, *cases[0])
    merge = refusal(cuda.MergeProgram, 0, bytes(72), b"", [], [], [], [], 1)
    assert "block 0: weight buffer 0 does not exist" in merge


def test_bad_addresses_are_refused(driver: stand_in.StandIn) -> None:
    row = Row(1.0)
    program = row.program()
    source, target = row.addresses
    digests = np.zeros(1, np.uint64)
    zero = np.zeros(1, np.uint64)
    driver.take_calls()
    for src, dst, out, said in [
        (zero, target, digests, "source buffer 0 has address 0, but blocks use it"),
        (source, zero, digests, "destination buffer 0 has address 0"),
        (source + np.uint64(2), target, digests, "not a multiple of 4 bytes"),
        (source, target + np.uint64(1), digests, "not a multiple of 2 bytes"),
        (np.zeros(2, np.uint64), target, digests, "src_addresses must be a vector of 1 elements"),
        (source, target, np.zeros(2, np.uint64), "digests must be a vector of 1 elements"),
    ]:
        assert said in refusal(program.run, src, dst, out, 0)
    assert driver.take_calls() == []  # before anything reaches the device
