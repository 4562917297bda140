"""The kernels: each executes a block list in one launch, on the device where the buffers live.

A backend is a module: `cpu` and `cuda` offer the same programs. What is missing says so when it is
asked for.
"""

from lora_refit.kernels.arrays import BufferType
from lora_refit.kernels.captured import CapturedCopy
from lora_refit.kernels.copy import CopyKernel, digest
from lora_refit.kernels.merge import MergeKernel
from lora_refit.kernels.records import (
    BLOCK_DTYPE,
    DTYPE_CODES,
    MERGE_BLOCK_DTYPE,
    MERGE_SEGMENT_DTYPE,
    MERGE_SUMS_DTYPE,
    SCALE_ONCE,
    ZERO_FILL,
)

__all__ = [
    "BLOCK_DTYPE",
    "DTYPE_CODES",
    "MERGE_BLOCK_DTYPE",
    "MERGE_SEGMENT_DTYPE",
    "MERGE_SUMS_DTYPE",
    "SCALE_ONCE",
    "ZERO_FILL",
    "BufferType",
    "CapturedCopy",
    "CopyKernel",
    "MergeKernel",
    "digest",
]
