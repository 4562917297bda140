"""Where shared and parameter memory lie in the generic address space of the simulated device."""

from __future__ import annotations

SHARED_WINDOW = 1 << 60
PARAMETER_WINDOW = 1 << 61
