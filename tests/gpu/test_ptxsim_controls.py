"""The PTX simulator itself: what it must refuse, what it must accept, and its arithmetic."""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import ptx_snippets
import ptxsim
import pytest
import shipped
from numpy.typing import NDArray
from ptxsim import PtxError

RIGHT = [
    "blocks_store_equal_values",
    "everyone_adds_atomically",
    "neighbour_lane_behind_warp_barrier",
    "other_warp_behind_barrier",
    "overwritten_after_others_read",
    "shared_atomics",
    "shuffle_of_half_a_warp",
    "shuffle_after_loops_of_different_length",
    "async_copy_waited_for",
    "async_copy_of_another_warp_behind_barrier",
]
WRONG = {
    "blocks_store_different_values": "two threads store different values",
    "store_beside_an_atomic": "an atomic where a thread stored",
    "load_of_another_blocks_store": "loads what another block stored",
    "read_only_load_after_a_store": "memory that this launch wrote",
    "neighbour_lane_without_warp_barrier": "another lane of the warp writes",
    "other_warp_behind_warp_barrier": "another warp writes",
    "two_warps_write_one_word": "two warps write",
    "overwritten_while_others_read": "another warp reads",
    "shared_atomics_without_barrier": "another warp writes",
    "barrier_after_exit": "some threads of the block exited",
    "barrier_in_a_branch": "some threads of the block exited",
    "shuffle_with_absent_lanes": "never come",
    "shuffle_not_named_in_the_mask": "whose mask does not name it",
    "store_out_of_bounds": "out of bounds global access",
    "load_before_the_start": "out of bounds global access",
    "misaligned_store": "misaligned global access",
    "shared_out_of_bounds": "out of bounds shared access",
    "async_copy_not_waited_for": "cp.async is still writing",
    "async_copy_of_another_warp_without_barrier": "another warp writes",
}


@cache
def control_kernels() -> dict[str, ptxsim.Kernel]:
    source = Path(__file__).with_name("control_kernels.cu")
    return ptxsim.parse(shipped.compile_source(source, "-arch=compute_80", "-ptx").read_text())


def run_control(name: str) -> NDArray[np.int32]:
    memory = np.zeros(64, np.int32)
    argument = struct.pack("<Q", memory.ctypes.data)
    ptxsim.launch(control_kernels()[name], 2, 64, [argument], [memory])
    return memory


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_kernel_passes(name: str) -> None:
    memory = run_control(name)
    if name in ("everyone_adds_atomically", "shared_atomics"):
        assert memory[0] == 128


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_kernel_is_refused(name: str) -> None:
    with pytest.raises(PtxError, match=WRONG[name]):
        run_control(name)


def test_every_control_is_used() -> None:
    assert sorted(control_kernels()) == sorted([*RIGHT, *WRONG])


REFUSED = {
    "add.u32 %r1, %r2, 1;": "read before it is written",
    "sin.approx.f32 %f1, 0f3F800000;": "not modelled",
    "add.rz.f32 %f1, 0f3F800000, 0f3F800000;": "not modelled",
    "add.ftz.f32 %f1, 0f3F800000, 0f3F800000;": "not modelled",
    "add.u32 %r1, %d0, 1;": "64 bits",
    "mov.u32 %r1, 0; div.u32 %r2, 5, %r1;": "division by zero",
    "mov.u32 %r1, %clock;": "not modelled",
    "bar.sync 1;": "barrier 0",
    "ld.global.u32 %r1, [%d0+256];": "out of bounds global access",
    "st.global.u32 [%d0+2], 0;": "misaligned global access",
    "st.global.v2.u32 [%d0+4], {%r1, %r2};": "read before it is written",
    "ld.global.v2.u32 {%r1, %r2}, [%d0+4];": "misaligned global access of 8",
    "ld.param.u64 %d1, [out+8];": "out of bounds parameter",
    "ld.global.u32 %r1, [12];": "out of bounds global access",
    "mul.f32 %f1, 0f3F800000, 0f40000000; add.f32 %f2, %f1, 0f3F800000;": "may fuse",
    "mov.u32 %r1, %tid.x; st.global.u32 [%d0], %r1;": "different values",
    "bra $missing;": "no label",
    "trap;": "trapped",
}


@pytest.mark.parametrize("body", REFUSED)
def test_an_instruction_is_refused(body: str) -> None:
    with pytest.raises(PtxError, match=REFUSED[body]):
        ptx_snippets.run(body)


def test_what_the_parser_accepts() -> None:
    """Guards, scopes of inline assembly, vectors, negative offsets, a register of another lane."""
    body = """
        mov.u32 %r1, %tid.x; mad.wide.u32 %d1, %r1, 8, %d0;
        setp.lt.and.u32 %p1|%p2, %r1, 7, 1;
        { .reg .b32 t; mov.b32 t, 5; @%p1 st.global.u32 [%d1], t; }
        { .reg .b32 t; mov.b32 t, 6; @!%p1 st.global.u32 [%d1], t; }
        add.s64 %d2, %d1, 16; mov.b32 %r2, -1;
        st.global.u32 [%d2+-12], %r2; /* the second word */
    """
    out = ptx_snippets.run(body)
    assert out[1::2].tolist() == [0xFFFFFFFF] * 32
    assert out[::2].tolist() == [5] * 7 + [6] * 25


def test_indexed_branches() -> None:
    """Lanes part for the targets of a table, meet again, and an index beyond it is refused."""
    body = """
        mov.u32 %r1, %tid.x; rem.u32 %r2, %r1, {modulus}; mad.wide.u32 %d1, %r1, 4, %d0;
        targets: .branchtargets $a, $b, $c;
        brx.idx %r2, targets;
        $a: mov.u32 %r3, 10; bra.uni $join;
        $b: mov.u32 %r3, 20; bra.uni $join;
        $c: mov.u32 %r3, 30;
        $join: shfl.sync.bfly.b32 %r4, %r3, 1, 31, -1;
        st.global.u32 [%d1], %r4;
    """
    out = ptx_snippets.run(body.replace("{modulus}", "3"))
    assert out[:32].tolist() == [10 * ((lane ^ 1) % 3 + 1) for lane in range(32)]
    with pytest.raises(PtxError, match="index 3 of a branch table of 3"):
        ptx_snippets.run(body.replace("{modulus}", "4"))


def test_unwritten_shared_memory_is_nan() -> None:
    body = """
        .shared .align 4 .b8 s[128];
        mov.u32 %r1, s; ld.shared.u32 %r2, [%r1]; st.global.u32 [%d0], %r2;
    """
    assert np.isnan(ptx_snippets.run(body)[:1].view(np.float32)).all()


def test_launches_that_do_not_fit_are_refused() -> None:
    kernel = ptx_snippets.kernel("")
    memory = np.zeros(4, np.uint32)
    argument = struct.pack("<Q", memory.ctypes.data)
    bad: list[tuple[str, Callable[[], Any]]] = [
        ("threads", lambda: ptxsim.launch(kernel, 1, 33, [argument], [memory])),
        ("the kernel allows", lambda: ptxsim.launch(kernel, 1, 2048, [argument], [memory])),
        ("arguments of", lambda: ptxsim.launch(kernel, 1, 32, [argument[:4]], [memory])),
        ("overlap", lambda: ptxsim.launch(kernel, 1, 32, [argument], [memory, memory[1:]])),
        ("shared", lambda: ptxsim.launch(kernel, 1, 32, [argument], [memory], 1 << 20)),
    ]
    for message, launch in bad:
        with pytest.raises(PtxError, match=message):
            launch()
