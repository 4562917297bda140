"""The CPU backend: C++ threads over tiles, no stream."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from lora_refit import _C
from lora_refit.kernels.backend import Addresses


class CpuCopyProgram:
    """A launch has finished when it returns."""

    def __init__(self, program: _C.CopyProgram, destinations: int) -> None:
        self._program = program
        self._digests = np.zeros(destinations, np.uint64)

    @property
    def bytes_written(self) -> int:
        return self._program.bytes_written

    def run(
        self, src_addresses: Addresses, dst_addresses: Addresses, digests: Addresses, stream: int
    ) -> None:
        self._program.run(src_addresses, dst_addresses, digests, _threads())

    def launch(self, src_addresses: Addresses, dst_addresses: Addresses, stream: int) -> None:
        self.run(src_addresses, dst_addresses, self._digests, stream)

    def collect(self, digests: Addresses) -> None:
        digests[:] = self._digests


class CpuMergeProgram:
    def __init__(self, program: _C.MergeProgram) -> None:
        self._program = program

    @property
    def bytes_written(self) -> int:
        return self._program.bytes_written

    def run(
        self,
        src_addresses: Addresses,
        dst_addresses: Addresses,
        digests: Addresses,
        sums: NDArray[np.void],
        stream: int,
    ) -> None:
        self._program.run(src_addresses, dst_addresses, digests, sums, _threads())


class CpuBackend:
    def copy_program(
        self,
        blocks: bytes,
        src_dtypes: Sequence[int],
        src_sizes: Sequence[int],
        dst_dtypes: Sequence[int],
        dst_sizes: Sequence[int],
    ) -> CpuCopyProgram:
        return CpuCopyProgram(
            _C.CopyProgram(blocks, src_dtypes, src_sizes, dst_dtypes, dst_sizes), len(dst_dtypes)
        )

    def merge_program(
        self,
        blocks: bytes,
        segments: bytes,
        src_dtypes: Sequence[int],
        src_sizes: Sequence[int],
        dst_dtypes: Sequence[int],
        dst_sizes: Sequence[int],
        modules: int,
    ) -> CpuMergeProgram:
        return CpuMergeProgram(
            _C.MergeProgram(blocks, segments, src_dtypes, src_sizes, dst_dtypes, dst_sizes, modules)
        )

    def digest(
        self, addresses: Addresses, nbytes: NDArray[np.uint64], out: Addresses, stream: int
    ) -> None:
        _C.digest(addresses, nbytes, out, _threads())


def _threads() -> int:
    """1 where torch was told to use one thread, as in trainer ranks that share a machine; 0 for
    the extension's own choice, which LORA_REFIT_THREADS overrides."""
    told = torch.get_num_threads() == 1 and "LORA_REFIT_THREADS" not in os.environ
    return 1 if told else 0
