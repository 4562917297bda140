"""Runs the PTX that nvcc emitted, on numpy: every thread of a launch is one lane of a vector.

    kernels = parse(ptx_text)
    launch(kernels["name"], grid, threads, [argument_bytes], buffers, dynamic_shared)

The meaning of each instruction is that of the PTX ISA. What the ISA leaves undefined (reading a
register never written, a shared memory race, lanes missing from a warp collective) is an error, and
so is an instruction in any form that is not modelled here: nothing is guessed.

Not modelled: the order of global memory beyond "who wrote what", and the rounding inside a tensor
core (each mma sums in fp64 and rounds once).
"""

from .errors import PtxError
from .launch import launch
from .parser import Kernel, parse

__all__ = ["Kernel", "PtxError", "launch", "parse"]
