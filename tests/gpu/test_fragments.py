"""The simulator's fragment maps against CuTe's, and mma and ldmatrix against numpy."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from pathlib import Path

import numpy as np
import ptx_snippets
import pytest
import shipped
from numpy.typing import NDArray
from ptxsim import PtxError, fragments
from ptxsim.fragments import FragmentMap

MAPS = {
    "a_16x16": fragments.A_16X16,
    "b_16x8": fragments.B_16X8,
    "c_bf16": fragments.ACCUMULATOR,
    "a_16x16_f16": fragments.A_16X16,
    "b_16x8_f16": fragments.B_16X8,
    "c_f16": fragments.ACCUMULATOR,
    "a_tf32": fragments.A_TF32,
    "b_tf32": fragments.B_TF32,
    "c_tf32": fragments.ACCUMULATOR,
    "x1": fragments.ldmatrix_map(1, transposed=False),
    "x2": fragments.ldmatrix_map(2, transposed=False),
    "x4": fragments.ldmatrix_map(4, transposed=False),
    "x1_trans": fragments.ldmatrix_map(1, transposed=True),
    "x2_trans": fragments.ldmatrix_map(2, transposed=True),
    "x4_trans": fragments.ldmatrix_map(4, transposed=True),
}


def cutlass_include() -> Path:
    spec = importlib.util.find_spec("cutlass_library")
    assert spec and spec.origin, "no CuTe: pip install -r requirements/cuda.txt"
    return Path(spec.origin).parent / "source" / "include"


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[int, ...]]]:
    """(lane, element, row, column) of each map, from CuTe on the host."""
    program = tmp_path_factory.mktemp("oracle") / "fragment_oracle"
    cuda = shipped.toolkit() / "include"
    include = [f"-I{folder}" for folder in (cutlass_include(), cuda, cuda / "cccl")]
    command = [os.environ.get("CXX", "g++"), "-std=c++17", "-w", *include, "-o", str(program)]
    subprocess.run([*command, str(Path(__file__).with_name("fragment_oracle.cpp"))], check=True)
    printed = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout
    maps: dict[str, list[tuple[int, ...]]] = {}
    for line in printed.splitlines():
        name, *numbers = line.split()
        maps.setdefault(name, []).append(tuple(map(int, numbers)))
    return maps


def table(where: FragmentMap) -> list[tuple[int, ...]]:
    lanes, elements = np.indices(where.rows.shape)
    columns = [part.ravel().tolist() for part in (lanes, elements, where.rows, where.columns)]
    return list(zip(*columns, strict=True))


def test_maps_equal_cute(oracle: dict[str, list[tuple[int, ...]]]) -> None:
    assert oracle == {name: table(where) for name, where in MAPS.items()}
    print({name: len(rows) for name, rows in oracle.items()})


def test_a_wrong_map_would_be_caught(oracle: dict[str, list[tuple[int, ...]]]) -> None:
    """Registers in another order, and rows and columns exchanged."""
    right = fragments.A_16X16
    order = [2, 3, 0, 1, 4, 5, 6, 7]
    exchanged = FragmentMap(right.rows[:, order], right.columns[:, order], 2)
    transposed = FragmentMap(right.columns, right.rows, 2)
    assert table(exchanged) != oracle["a_16x16"] != table(transposed)
    assert table(fragments.ldmatrix_map(4, transposed=True)) != oracle["x4"]


def fragment_words(matrix: NDArray[np.generic], where: FragmentMap) -> NDArray[np.uint32]:
    """Registers `u32[lane, register]` that hold a matrix."""
    elements = np.ascontiguousarray(matrix[where.rows, where.columns])
    return elements.view(np.uint32).reshape(32, where.registers)


def run_mma(opcode: str, parts: list[NDArray[np.uint32]]) -> NDArray[np.float32]:
    """One warp: each lane loads its registers of A, B and C, and stores its four of D."""
    words = np.concatenate(parts, axis=1)
    count = words.shape[1]
    names = [f"%r{i + 2}" for i in range(count)]
    a, b = parts[0].shape[1], parts[1].shape[1]
    groups = [names[:a], names[a : a + b], names[a + b :]]
    operands = ", ".join("{" + ", ".join(group) + "}" for group in groups)
    lines = [f"mov.u32 %r1, %tid.x; mad.wide.u32 %d1, %r1, {4 * count}, %d0;"]
    lines += [f"mov.b32 {n}, 0; ld.global.u32 {n}, [%d1+{4 * i}];" for i, n in enumerate(names)]
    lines += [f"{opcode} {{%f0, %f1, %f2, %f3}}, {operands};"]
    lines += [f"st.global.f32 [%d1+{4 * i}], %f{i};" for i in range(4)]
    out = ptx_snippets.run("\n".join(lines), memory=words)
    return out.reshape(32, count)[:, :4].copy().view(np.float32)


@pytest.mark.parametrize("dtype", ["bf16", "f16", "tf32"])
def test_mma_multiplies(dtype: str) -> None:
    """Small integers, so that every product and sum is exact."""
    rng = np.random.default_rng(4)
    k = 8 if dtype == "tf32" else 16
    a, b = (rng.integers(-8, 9, shape).astype("f4") for shape in ((16, k), (k, 8)))
    c = rng.integers(-99, 99, (16, 8)).astype("f4")
    encode = {
        "bf16": lambda m: (m.view("u4") >> 16).astype("u2"),
        "f16": lambda m: m.astype("f2"),
        "tf32": lambda m: m,
    }[dtype]
    a_map = fragments.A_TF32 if dtype == "tf32" else fragments.A_16X16
    b_map = fragments.B_TF32 if dtype == "tf32" else fragments.B_16X8
    parts = [fragment_words(encode(a), a_map), fragment_words(encode(b), b_map)]
    parts.append(fragment_words(c, fragments.ACCUMULATOR))
    opcode = f"mma.sync.aligned.m16n8k{k}.row.col.f32.{dtype}.{dtype}.f32"
    got = run_mma(opcode, parts)
    where = fragments.ACCUMULATOR
    assert np.array_equal(got, (a @ b + c)[where.rows, where.columns])


def test_tf32_operands_must_have_been_rounded() -> None:
    parts = [np.full((32, count), 0x3F800001, np.uint32) for count in (4, 2, 4)]
    with pytest.raises(PtxError, match="not rounded"):
        run_mma("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32", parts)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("matrices", [1, 2, 4])
def test_ldmatrix_loads(matrices: int, transposed: bool) -> None:
    """Rows of 16-bit numbers, each at its own place in shared memory."""
    names = ", ".join(f"%r{i + 4}" for i in range(matrices))
    opcode = f"ldmatrix.sync.aligned.m8n8.x{matrices}{'.trans' if transposed else ''}.shared.b16"
    stores = "\n".join(f"st.global.u32 [%d2+{128 * i}], %r{i + 4};" for i in range(matrices))
    body = f"""
        .shared .align 16 .b8 s[1024];
        mov.u32 %r1, %tid.x; mad.lo.s32 %r2, %r1, 16, 0; mov.u32 %r3, s; add.s32 %r2, %r3, %r2;
        mad.wide.u32 %d1, %r1, 16, %d0; mad.wide.u32 %d2, %r1, 4, %d0;
        ld.global.v4.u32 {{%r10, %r11, %r12, %r13}}, [%d1];
        st.shared.v4.u32 [%r2], {{%r10, %r11, %r12, %r13}};
        bar.sync 0;
        {opcode} {{{names}}}, [%r2];
        {stores}
    """
    rows = np.arange(32 * 8, dtype=np.uint16).reshape(32, 8)
    out = ptx_snippets.run(body, memory=rows.view(np.uint32).reshape(-1))
    got = out[: 32 * matrices].reshape(matrices, 32).T.copy().view(np.uint16)
    where = fragments.ldmatrix_map(matrices, transposed)
    assert np.array_equal(got, rows[where.rows, where.columns])
