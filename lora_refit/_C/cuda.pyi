"""The CUDA backend: programs, device memory, handles, streams.

The driver, libcuda.so.1, is looked for at first use, never at import. Devices are ordinals as the
driver counts them under CUDA_VISIBLE_DEVICES; addresses, and streams of torch or CuPy, are
integers; stream 0 is the default stream. Array arguments are never converted. Long calls release
the GIL.

Bad arguments raise ValueError. Everything the driver refuses raises CudaError, whose text names the
call, the CUDA error, the GPU and a remedy; so does everything in a process that was forked after
its parent used CUDA. `close()` may be called more than once; a closed object's other members raise
ValueError.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer

_Bytes = bytes  # the classes below have a member of that name

class CudaError(RuntimeError): ...

def status() -> str:
    """Empty where the driver can be used, else what is missing."""

def set_image(fatbin: bytes) -> None:
    """The compiled kernels, as nvcc -fatbin writes them. Each device loads them at first use; a
    program made before raises CudaError."""

class Device:
    @property
    def ordinal(self) -> int: ...
    @property
    def uuid(self) -> str:
        """As nvidia-smi shows it, "GPU-..."."""

    @property
    def name(self) -> str: ...
    @property
    def compute_capability(self) -> tuple[int, int]: ...
    @property
    def multiprocessors(self) -> int: ...
    @property
    def memory_bytes(self) -> int: ...

def devices() -> list[Device]: ...
def ordinal_of(uuid: str) -> int | None:
    """None where this process does not see that GPU."""

def can_access_peer(device: int, other: int) -> bool: ...
def enable_peer_access(device: int, other: int) -> None:
    """Lets kernels on `device` use memory of `other`. Harmless where they already may."""

class CopyProgram:
    """lora_refit._C.CopyProgram on a GPU: same blocks, same checks, same bits, same digests.

    Its runs follow each other on the device, on whatever streams they are given.
    """

    def __init__(
        self,
        device: int,
        blocks: Buffer,
        src_dtypes: Sequence[int],
        src_sizes: Sequence[int],
        dst_dtypes: Sequence[int],
        dst_sizes: Sequence[int],
    ) -> None: ...
    def run(
        self,
        src_addresses: NDArray[np.uint64],
        dst_addresses: NDArray[np.uint64],
        digests: NDArray[np.uint64],
        stream: int,
    ) -> None:
        """Moves everything once, in one launch, and waits. Overwrites `digests`.

        Addresses must be multiples of their buffer's element size. They are uploaded where they
        differ from those of the run before.
        """

    def launch(
        self, src_addresses: NDArray[np.uint64], dst_addresses: NDArray[np.uint64], stream: int
    ) -> None:
        """`run` without waiting; `collect` gets the digests.

        May be captured: run once with the same addresses before. A captured launch uses the
        addresses of the program's last run at the time of the replay, and the program must live as
        long as the graph.
        """

    def collect(self, digests: NDArray[np.uint64]) -> None:
        """Waits for the last launch, and overwrites `digests` with what it found.

        Only launches that were not captured are waited for: synchronize with a replay first.
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
        device: int,
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
        stream: int,
    ) -> None:
        """Merges everything once, in one launch, and waits.

        Overwrites `digests`, one per destination, and `sums`, `modules` packed MergeSums.
        """

    @property
    def block_count(self) -> int: ...
    @property
    def strip_count(self) -> int: ...
    @property
    def bytes_read(self) -> int: ...
    @property
    def bytes_written(self) -> int: ...

def digest(
    device: int,
    addresses: NDArray[np.uint64],
    sizes_bytes: NDArray[np.uint64],
    out: NDArray[np.uint64],
    stream: int,
) -> None:
    """Digests of contiguous buffers. Addresses and sizes are multiples of 2 bytes.

    The tables of the last few sets of buffers stay on the device.
    """

class DeviceMemory:
    """cuMemAlloc, for IPC handles."""

    def __init__(self, device: int, bytes: int) -> None:
        """`bytes` is rounded up to 2 MiB, so that a handle shares nothing else."""

    @property
    def address(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    def ipc_handle(self) -> _Bytes:
        """64 bytes for open_ipc() in another process."""

    def close(self) -> None: ...

class SharedDeviceMemory:
    """Virtual memory management, for file descriptors."""

    def __init__(self, device: int, bytes: int) -> None:
        """`bytes` is rounded up to the device's granularity."""

    @property
    def address(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    def export_fd(self) -> int:
        """A new descriptor for open_fd() in another process. The caller closes it."""

    def close(self) -> None: ...

class Mapping:
    """Memory that somebody else owns, made usable on one device."""

    @property
    def address(self) -> int: ...
    def close(self) -> None: ...

def open_ipc(device: int, handle: bytes) -> Mapping:
    """Refused in the process that exported the handle. Enables peer access where needed."""

def open_fd(device: int, fd: int, bytes: int) -> Mapping:
    """`bytes` is the exporter's `SharedDeviceMemory.bytes`. The caller keeps the descriptor."""

def register_host(device: int, address: int, bytes: int) -> Mapping:
    """Host memory, page-locked, for kernels of every device. It must outlive the mapping."""

class Stream:
    """Does not wait for the default stream, nor it for this one."""

    def __init__(self, device: int) -> None: ...
    @property
    def handle(self) -> int: ...
    def close(self) -> None: ...

class Event:
    def __init__(self, device: int) -> None: ...
    def record(self, stream: int) -> None: ...
    def synchronize(self) -> None: ...
    @property
    def done(self) -> bool: ...
    def close(self) -> None: ...

class Graph:
    def launch(self, stream: int) -> None: ...
    def close(self) -> None: ...

def begin_capture(device: int, stream: int) -> None:
    """The default stream cannot be captured."""

def end_capture(device: int, stream: int) -> Graph: ...
def is_capturing(device: int, stream: int) -> bool: ...
def synchronize(device: int, stream: int) -> None: ...
def memset(device: int, address: int, bytes: int, stream: int) -> None:
    """Zeroes device memory once the stream gets there."""

def copy_to_host(device: int, address: int, bytes: int) -> bytes: ...
def copy_from_host(device: int, address: int, data: Buffer) -> None:
    """Returns when the bytes have arrived."""
