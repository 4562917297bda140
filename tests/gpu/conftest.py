"""Tests of the CUDA kernels without a GPU. They compare with the CPU kernel's own references."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "unit"))
