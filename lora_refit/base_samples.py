"""Sampled elements of a base weight, which trainer and engine compare before the first rollout."""

from __future__ import annotations

import msgspec


class BaseSample(msgspec.Struct, frozen=True, array_like=True):
    """Elements of one checkpoint weight [out, in]: the product of some rows and some columns.

    values: float32 [rows, cols], little endian, row after row.
    """

    name: str
    shape: tuple[int, int]
    rows: tuple[int, ...]
    cols: tuple[int, ...]
    values: bytes
