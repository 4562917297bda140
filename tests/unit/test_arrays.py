"""Arrays of other libraries as sources and destinations of the copy kernel."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lora_refit.devices import common_device, stream_handle
from lora_refit.errors import LayoutMismatch, UnsupportedAdapter
from lora_refit.kernels import BLOCK_DTYPE, BufferType, CopyKernel
from lora_refit.kernels.arrays import addresses, describe

CUDA = torch.device("cuda", 0)


class OnlyDlpack:
    """A foreign array that speaks nothing but DLPack."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __dlpack__(self, **options: Any) -> Any:
        return self._tensor.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._tensor.__dlpack_device__()


class CudaArray:
    """A foreign GPU array, as CuPy and Numba describe theirs."""

    def __init__(self, shape: tuple[int, ...], typestr: str, **more: Any) -> None:
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": typestr,
            "data": (4096, False),
            "version": 3,
            **more,
        }


def one_block(numel: int) -> np.ndarray:
    blocks = np.zeros(1, BLOCK_DTYPE)
    blocks["size"], blocks["scale"] = (1, 1, numel), 1.0
    blocks["src_stride"] = blocks["dst_stride"] = (0, 0, 1)
    return blocks


@pytest.mark.parametrize("wrap", [lambda t: t, OnlyDlpack], ids=["torch", "dlpack"])
def test_copies_between_arrays(wrap: Any) -> None:
    source, target = torch.randn(5, 7), torch.full((35,), float("nan"), dtype=torch.bfloat16)
    kernel = CopyKernel(
        one_block(35), [BufferType(torch.float32, 35)], [BufferType(torch.bfloat16, 35)]
    )
    kernel.copy([wrap(source)], [wrap(target)])
    assert torch.equal(target, source.to(torch.bfloat16).flatten())


def test_numpy_speaks_dlpack_too() -> None:
    array = np.arange(6, dtype=np.float32)
    found = describe(array, "source array 0")
    assert found.address == array.ctypes.data and found.type == BufferType(torch.float32, 6)


@pytest.mark.parametrize(
    ("typestr", "dtype"),
    [("<f4", torch.float32), ("<f2", torch.float16), ("<V2", torch.bfloat16)],
)
def test_reads_the_cuda_array_interface(typestr: str, dtype: torch.dtype) -> None:
    array = CudaArray((3, 4), typestr, strides=None)
    assert addresses("source", [array], [BufferType(dtype, 12)], CUDA).tolist() == [4096]


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (CudaArray((3, 4), "<f8"), "type '<f8'"),
        (CudaArray((3, 4), ">f4"), "type '>f4'"),
        (CudaArray((3, 4), "<f4", strides=(4, 12)), r"strides \(4, 12\)"),
        (CudaArray((3, 4), "<f4", data=(4096, True)), "is read-only"),
        (torch.zeros(4, 3).t(), "strides"),
        (object(), "is a object; pass"),
    ],
)
def test_unusable_arrays_are_named(array: object, message: str) -> None:
    with pytest.raises(LayoutMismatch, match=f"destination array 0.*{message}"):
        describe(array, "destination array 0")


def test_contiguous_strides_may_be_spelled_out() -> None:
    array = CudaArray((3, 4), "<f4", strides=(16, 4))
    assert describe(array, "source array 0").type.numel == 12


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (torch.zeros(11), "source array 1 holds 11 x torch.float32, the plan says 12"),
        (torch.zeros(12, dtype=torch.float16), "holds 12 x torch.float16"),
        (CudaArray((12,), "<f4"), "lies on cuda, the kernel runs on cpu"),
    ],
)
def test_arrays_that_do_not_fit_the_plan_are_named(array: object, message: str) -> None:
    types = [BufferType(torch.float32, 12)] * 2
    with pytest.raises(LayoutMismatch, match=message):
        addresses("source", [torch.zeros(12), array], types, torch.device("cpu"))
    with pytest.raises(LayoutMismatch, match="1 source arrays for 2"):
        addresses("source", [array], types, torch.device("cpu"))


class FakeStream:
    def __init__(self, **attributes: int) -> None:
        self.__dict__.update(attributes)


class ProtocolStream:
    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, 99


@pytest.mark.parametrize(
    ("stream", "handle"),
    [(7, 7), (FakeStream(cuda_stream=11), 11), (FakeStream(ptr=13), 13), (ProtocolStream(), 99)],
)
def test_streams_of_other_libraries(stream: object, handle: int) -> None:
    assert stream_handle(stream, CUDA) == handle


def test_what_is_no_stream_is_refused() -> None:
    for wrong in ("stream", True, object()):
        with pytest.raises(LayoutMismatch, match="is no CUDA stream"):
            stream_handle(wrong, CUDA)
    assert stream_handle(None, torch.device("cpu")) == 0


def test_an_adapter_on_two_devices_is_refused() -> None:
    tensors = [("a", torch.zeros(1)), ("b", torch.zeros(1, device="meta"))]
    assert common_device(tensors[:1]) == torch.device("cpu") == common_device([])
    with pytest.raises(UnsupportedAdapter, match="a lies on cpu but b on meta"):
        common_device(tensors)
