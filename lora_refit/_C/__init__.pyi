"""The C++ extension: copy and merge programs, digests and words in shared memory.

Addresses are integers. Array arguments are never converted: they must have exactly the given dtype
and be contiguous. Long calls release the GIL. Bad input raises ValueError, and
a bad LORA_REFIT_SIMD or LORA_REFIT_THREADS in the environment RuntimeError.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer

from lora_refit._C import cuda as cuda

class CopyProgram:
    def __init__(
        self,
        blocks: Buffer,
        src_dtypes: Sequence[int],
        src_sizes: Sequence[int],
        dst_dtypes: Sequence[int],
        dst_sizes: Sequence[int],
        tile_bytes: int = ...,
    ) -> None:
        """`blocks` is a packed array of CopyBlock; sizes are in elements.

        Every block is checked against its buffers once, here; the error names the block's number.
        `tile_bytes` is the work that a thread claims at a time.
        """

    def run(
        self,
        src_addresses: NDArray[np.uint64],
        dst_addresses: NDArray[np.uint64],
        digests: NDArray[np.uint64],
        threads: int = 0,
    ) -> None:
        """Overwrites `digests` with the digest of what was written to each destination.

        `threads=0` means one per CPU of the affinity mask, at most 8, or LORA_REFIT_THREADS.
        """

    @property
    def block_count(self) -> int: ...
    @property
    def tile_count(self) -> int: ...
    @property
    def bytes_read(self) -> int: ...
    @property
    def bytes_written(self) -> int: ...

class MergeProgram:
    """W' = round(W + scale * B @ A) over weights, see csrc/block.h."""

    def __init__(
        self,
        blocks: Buffer,
        segments: Buffer,
        src_dtypes: Sequence[int],
        src_sizes: Sequence[int],
        dst_dtypes: Sequence[int],
        dst_sizes: Sequence[int],
        modules: int,
    ) -> None:
        """`blocks` and `segments` are packed arrays of MergeBlock and MergeSegment.

        Sizes are in elements. Every block is checked against its buffers once, here; the error
        names the block's number.
        """

    def run(
        self,
        src_addresses: NDArray[np.uint64],
        dst_addresses: NDArray[np.uint64],
        digests: NDArray[np.uint64],
        sums: NDArray[np.void],
        threads: int = 0,
    ) -> None:
        """Overwrites `digests`, one per destination, and `sums`, `modules` packed MergeSums.

        Neither depends on `threads`, which is as in `CopyProgram.run`. W' and its digest are the
        same on every CPU.
        """

    @property
    def block_count(self) -> int: ...
    @property
    def tile_count(self) -> int: ...
    @property
    def bytes_read(self) -> int: ...
    @property
    def bytes_written(self) -> int: ...

def digest(
    addresses: NDArray[np.uint64],
    sizes_bytes: NDArray[np.uint64],
    out: NDArray[np.uint64],
    threads: int = 0,
) -> None:
    """Digests of contiguous buffers whose sizes are multiples of 2 bytes."""

def block_layout() -> dict[str, int]:
    """Byte offset of each CopyBlock field, and its size under "sizeof"."""

def cpu_features() -> str:
    """The kernels that this CPU gets: "avx2" or "portable".

    LORA_REFIT_SIMD=portable in the environment forces the fallback for programs made and digests
    computed from then on.
    """

def load_acquire(address: int) -> int: ...
def store_release(address: int, value: int) -> None: ...
def fence_seq_cst() -> None: ...
def compare_exchange(address: int, expected: int, desired: int) -> bool: ...
