"""A copy kernel as a CUDA graph, captured again when its buffers move."""

from __future__ import annotations

import contextlib

import numpy as np

from lora_refit import _C
from lora_refit.devices import stream_handle
from lora_refit.errors import TransportUnavailable
from lora_refit.kernels.backend import Addresses, typed_errors
from lora_refit.kernels.copy import CopyKernel
from lora_refit.kernels.cuda import ordinal


class CapturedCopy:
    """Replays a kernel's launch with the addresses that it was captured with.

    Args:
        kernel: on a CUDA device. A program has one address table: when somebody else has run the
            kernel, the next run captures anew.
        stream: a torch or CuPy stream or a handle, not the default stream, which CUDA cannot
            capture.

    Raises:
        TransportUnavailable: the kernel runs on a CPU.
    """

    def __init__(self, kernel: CopyKernel, stream: object) -> None:
        if kernel.device.type != "cuda":
            raise TransportUnavailable(
                f"a kernel on {kernel.device} cannot be captured; CUDA graphs need a CUDA device"
            )
        self._kernel = kernel
        self._device = ordinal(kernel.device)
        self._stream = stream_handle(stream, kernel.device)
        self._graph: _C.cuda.Graph | None = None
        self._captured: tuple[Addresses, Addresses] | None = None
        self._submissions = 0
        self.captures = 0

    def run(self, src_addresses: Addresses, dst_addresses: Addresses) -> Addresses:
        """As CopyKernel.run, by replaying; where an address has changed, runs and captures anew."""
        if self._graph is None or not self._is_captured_with(src_addresses, dst_addresses):
            return self._capture(src_addresses, dst_addresses)
        with typed_errors("the captured copy cannot be replayed"):
            self._graph.launch(self._stream)
            _C.cuda.synchronize(self._device, self._stream)
        return self._kernel.collect()

    def close(self) -> None:
        """Drop the graph; may be called again."""
        if self._graph is not None:
            self._graph.close()
            self._graph = None

    def _is_captured_with(self, src: Addresses, dst: Addresses) -> bool:
        captured = self._captured
        if captured is None or self._submissions != self._kernel.submissions:
            return False
        return all(
            np.array_equal(now, then) for now, then in zip((src, dst), captured, strict=True)
        )

    def _capture(self, src: Addresses, dst: Addresses) -> Addresses:
        self.close()
        digests = self._kernel.run(src, dst, self._stream).copy()
        with typed_errors("the copy kernel cannot be captured"):
            _C.cuda.begin_capture(self._device, self._stream)
            try:
                self._kernel.launch(src, dst, self._stream)
            except BaseException:
                self._end_unfinished_capture()
                raise
            self._graph = _C.cuda.end_capture(self._device, self._stream)
        self._captured = (src.copy(), dst.copy())
        self._submissions = self._kernel.submissions
        self.captures += 1
        return digests

    def _end_unfinished_capture(self) -> None:
        """Replaying what was captured before a launch failed would copy nothing."""
        with contextlib.suppress(_C.cuda.CudaError):
            _C.cuda.end_capture(self._device, self._stream).close()
