"""The one error of the simulator."""

from __future__ import annotations


class PtxError(RuntimeError):
    """The program broke a rule of the PTX ISA, or uses something that is not modelled."""
