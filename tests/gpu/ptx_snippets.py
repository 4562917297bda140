"""Hand-written PTX: one instruction on random inputs, or a few lines in a kernel's frame."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import ptxsim
from numpy.typing import NDArray

HEADER = ".version 9.0\n.target sm_80\n.address_size 64\n"
REGISTERS = """
    .reg .pred %p<16>; .reg .b16 %h<16>; .reg .b32 %r<32>; .reg .f32 %f<16>;
    .reg .b64 %d<32>; .reg .f64 %g<16>;
"""
PREFIX = {2: "%h", 4: "%r", 8: "%d"}


def kernel(body: str) -> ptxsim.Kernel:
    """A kernel of one pointer parameter `out`, which `%d0` holds."""
    text = (
        f"{HEADER}.visible .entry snippet(.param .u64 out)\n{{{REGISTERS}"
        f"ld.param.u64 %d0, [out];\n{body}\nret;\n}}"
    )
    return ptxsim.parse(text)["snippet"]


def run(body: str, memory: NDArray[np.uint32] | None = None) -> NDArray[np.uint32]:
    """Runs one warp; what it leaves in the words that `%d0` points to, by default 64 zeros."""
    out = np.zeros(64, np.uint32) if memory is None else memory.reshape(-1).copy()
    ptxsim.launch(kernel(body), 1, 32, [struct.pack("<Q", out.ctypes.data)], [out])
    return out


def evaluate(instruction: str, result: np.dtype[Any], inputs: list[NDArray[Any]]) -> NDArray[Any]:
    """`instruction` on each row of inputs. In its text {0} is the result and {1}... the inputs."""
    count = -(-len(inputs[0]) // 32) * 32
    padded = [np.ascontiguousarray(np.resize(values, count)) for values in inputs]
    output = np.zeros(count, result)
    arrays = [output, *padded]
    pointers = "".join(
        f".param .u64 p{i}{',' if i < len(inputs) else ''}" for i in range(len(arrays))
    )
    names = [f"{PREFIX[array.itemsize]}{i + 1}" for i, array in enumerate(arrays)]
    body = "mov.u32 %r20, %ctaid.x; mov.u32 %r21, %tid.x; mad.lo.s32 %r22, %r20, 32, %r21;\n"
    for i, (array, name) in enumerate(zip(arrays, names, strict=True)):
        body += (
            f"ld.param.u64 %d20, [p{i}]; mad.wide.u32 %d{21 + i}, %r22, {array.itemsize}, %d20;\n"
        )
        if i:
            body += f"ld.global.b{8 * array.itemsize} {name}, [%d{21 + i}];\n"
    body += f"{instruction.format(*names)}\nst.global.b{8 * output.itemsize} [%d21], {names[0]};\n"
    text = f"{HEADER}.visible .entry snippet({pointers})\n{{{REGISTERS}{body}ret;\n}}"
    arguments = [struct.pack("<Q", array.ctypes.data) for array in arrays]
    ptxsim.launch(ptxsim.parse(text)["snippet"], count // 32, 32, arguments, arrays)
    return output[: len(inputs[0])]
