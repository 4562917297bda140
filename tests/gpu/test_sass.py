"""Gates on the machine code that ships, for each architecture; and a mutant that each one catches.

They hold what no run without a GPU can show: registers that spill, accesses that the compiler
split, tensor cores that are not used.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import shipped
from sass import MachineKernel, disassemble

THREADS = 256
REGISTERS_PER_MULTIPROCESSOR = 65536
BLOCKS_PER_MULTIPROCESSOR = {
    "lora_refit_copy": 4,
    "lora_refit_digest": 4,
    "lora_refit_merge_f32": 2,
    "lora_refit_merge_f16": 2,
    "lora_refit_merge_bf16": 2,
}
TENSOR_CORE = {
    "lora_refit_merge_f32": r"HMMA\.1688\.F32\.TF32$",
    "lora_refit_merge_f16": r"HMMA\.16816\.F32$",
    "lora_refit_merge_bf16": r"HMMA\.16816\.F32\.BF16$",
}
LOADS_IN_FLIGHT = 4
WIDE_VARIANTS = 21
"""Dtype pairs and scalings that read 16 bytes for 16 written: all but fp16 and bf16 to fp32."""
HALF_WIDE_VARIANTS = 6


def check_no_local_memory(kernel: MachineKernel) -> None:
    assert kernel.count(r"LDL|STL") == 0
    assert kernel.stack_bytes == kernel.local_bytes == 0


def check_registers(kernel: MachineKernel, blocks: int) -> None:
    """So many blocks fit a multiprocessor; registers are dealt to a thread in steps of 8."""
    dealt = -(-kernel.registers // 8) * 8
    assert dealt * THREADS * blocks <= REGISTERS_PER_MULTIPROCESSOR, kernel.registers


def check_tensor_core(kernel: MachineKernel, pattern: str) -> None:
    assert kernel.count(pattern) > 0
    assert kernel.count(pattern) == kernel.count("HMMA"), "several kinds of mma"


def check_wide_copy(kernel: MachineKernel, wide: int, half_wide: int) -> None:
    """Main loops, each with at least four loads before its first 16-byte store."""
    accesses = [opcode for opcode in kernel.opcodes if opcode.startswith(("LDG", "STG"))]
    text = "".join(_letter(opcode) for opcode in accesses)
    assert len(re.findall(rf"L{{{LOADS_IN_FLIGHT},}}S", text)) >= wide, text
    assert len(re.findall(rf"l{{{LOADS_IN_FLIGHT},}}S", text)) >= half_wide, text


def _letter(opcode: str) -> str:
    """L and l for loads of 16 and 8 bytes, S for a store of 16, a dot for what is narrower."""
    kind, width = opcode[:3], re.search(r"\.(128|64)\b", opcode)
    letters = {("LDG", "128"): "L", ("LDG", "64"): "l", ("STG", "128"): "S"}
    return letters.get((kind, width[1] if width else ""), ".")


@pytest.mark.parametrize("architecture", shipped.ARCHITECTURES)
def test_machine_code(architecture: int) -> None:
    kernels = disassemble(shipped.cubins()[architecture])
    assert sorted(kernels) == sorted(BLOCKS_PER_MULTIPROCESSOR)
    for name, kernel in kernels.items():
        check_no_local_memory(kernel)
        check_registers(kernel, BLOCKS_PER_MULTIPROCESSOR[name])
    for name, pattern in TENSOR_CORE.items():
        check_tensor_core(kernels[name], pattern)
    check_wide_copy(kernels["lora_refit_copy"], WIDE_VARIANTS, HALF_WIDE_VARIANTS)
    print(f"sm_{architecture}: registers { {n: k.registers for n, k in kernels.items()} }")


def compiled(source: Path, folder: Path) -> dict[str, MachineKernel]:
    return disassemble(shipped.compile_source(source, "-arch=sm_80", "-cubin", include=[folder]))


def edited(name: str, folder: Path, *edits: tuple[str, str]) -> Path:
    """A copy of `csrc/cuda/<name>` with texts replaced."""
    text = (shipped.CSRC / "cuda" / name).read_text()
    for old, new in edits:
        assert old in text, f"{name} has no {old!r} to edit"
        text = text.replace(old, new)
    target = folder / "cuda" / name
    target.parent.mkdir(exist_ok=True)
    target.write_text(text)
    return target


def test_local_memory_is_caught(tmp_path: Path) -> None:
    """Packets that an unrolled loop kept in registers are indexed by a loop variable instead."""
    source = edited("digest.cu", tmp_path, ("#pragma unroll", "#pragma unroll 1"))
    with pytest.raises(AssertionError):
        check_no_local_memory(compiled(source, tmp_path)["lora_refit_digest"])


def test_too_many_registers_are_caught(tmp_path: Path) -> None:
    """More loads in flight, and no bound that would hold the compiler back."""
    edits = [("(kThreads, 4)", "(kThreads)"), ("kInFlight = 4", "kInFlight = 32")]
    kernel = compiled(edited("digest.cu", tmp_path, *edits), tmp_path)["lora_refit_digest"]
    with pytest.raises(AssertionError):
        check_registers(kernel, BLOCKS_PER_MULTIPROCESSOR[kernel.name])


NARROW_LOAD = """
__device__ __forceinline__ uint4 load_narrow(const std::byte* address) {
  return {ptx::load_4(address), ptx::load_4(address + 4), ptx::load_4(address + 8),
          ptx::load_4(address + 12)};
}
"""


def test_narrow_copies_are_caught(tmp_path: Path) -> None:
    """The kernel, cut to two variants for a quick build, passes; with loads split in four, not."""
    fewer = ("kVariantCount = kZeroFillVariant4 + 1", "kVariantCount = 2")
    edited("copy_variants.cuh", tmp_path, fewer)
    source = shipped.CSRC / "cuda" / "copy.cu"
    check_wide_copy(compiled(source, tmp_path)["lora_refit_copy"], wide=2, half_wide=0)
    edited(
        "packet.cuh",
        tmp_path,
        ("ptx::load_streaming_16(", "load_narrow("),
        ("namespace lora_refit::cuda {", f"namespace lora_refit::cuda {{{NARROW_LOAD}"),
    )
    with pytest.raises(AssertionError):
        check_wide_copy(compiled(source, tmp_path)["lora_refit_copy"], wide=2, half_wide=0)


def test_other_tensor_core_instructions_are_caught() -> None:
    """Each merge kernel fails the gates of the other two, and a kernel without mma fails all."""
    kernels = disassemble(shipped.cubins()[80])
    for gate, pattern in TENSOR_CORE.items():
        for name in {*TENSOR_CORE, "lora_refit_copy"} - {gate}:
            with pytest.raises(AssertionError):
                check_tensor_core(kernels[name], pattern)
