"""numpy twins of the structs in csrc/block.h, where their fields are explained."""

from __future__ import annotations

import numpy as np
import torch

BLOCK_DTYPE = np.dtype(
    [
        ("src", "<i4"),
        ("dst", "<i4"),
        ("src_offset", "<i8"),
        ("dst_offset", "<i8"),
        ("size", "<i8", (3,)),
        ("src_stride", "<i8", (3,)),
        ("dst_stride", "<i8", (3,)),
        ("scale", "<f4"),
        ("flags", "<u4"),
    ]
)
"""`CopyBlock`."""

MERGE_BLOCK_DTYPE = np.dtype(
    [
        ("weight", "<i4"),
        ("dst", "<i4"),
        ("weight_offset", "<i8"),
        ("dst_offset", "<i8"),
        ("rows", "<i8"),
        ("cols", "<i8"),
        ("weight_row_stride", "<i8"),
        ("dst_row_stride", "<i8"),
        ("first_segment", "<i4"),
        ("segment_count", "<i4"),
        ("module", "<i4"),
        ("scale", "<f4"),
    ]
)
"""`MergeBlock`."""

MERGE_SEGMENT_DTYPE = np.dtype(
    [
        ("b", "<i4"),
        ("a", "<i4"),
        ("b_offset", "<i8"),
        ("a_offset", "<i8"),
        ("b_row_stride", "<i8"),
        ("b_k_stride", "<i8"),
        ("a_k_stride", "<i8"),
        ("a_col_stride", "<i8"),
        ("rank", "<i8"),
    ]
)
"""`MergeSegment`."""

MERGE_SUMS_DTYPE = np.dtype(
    [("residual", "<f8"), ("delta", "<f8"), ("changed", "<u8"), ("elements", "<u8")]
)
"""`MergeSums`."""

ZERO_FILL = -1
"""`src` of a block that fills its destination with zeros."""

SCALE_ONCE = 1
"""Flag: scale in fp32 and round once, instead of cast, then scale in the destination's dtype."""

DTYPE_CODES: dict[torch.dtype, int] = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
