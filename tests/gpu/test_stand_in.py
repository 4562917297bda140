"""The stand-in driver refuses what CUDA refuses: without that the driver's tests would prove little.

Calls go straight to the library, so what csrc/driver never does can be done wrong here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from ctypes import byref, c_int, c_uint64, c_void_p

import pytest
import stand_in

INVALID_VALUE, NOT_FOUND, INVALID_CONTEXT, INVALID_HANDLE = 1, 500, 201, 400
ILLEGAL_STATE, CAPTURE_UNSUPPORTED, CAPTURE_INVALIDATED = 401, 900, 901
UNIT = 2 << 20
READ_WRITE = 3


class Location(ctypes.Structure):
    _fields_ = (("type", c_int), ("id", c_int))


class Properties(ctypes.Structure):
    _fields_ = (
        ("type", c_int),
        ("handle_types", c_int),
        ("location", Location),
        ("metadata", c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class Access(ctypes.Structure):
    _fields_ = (("location", Location), ("flags", c_int))


ON_DEVICE = Location(1, 0)
EXPORTABLE = Properties(1, 1, ON_DEVICE)
PRIVATE = Properties(1, 0, ON_DEVICE)
Driver = Callable[..., int]


@pytest.fixture
def call() -> Iterator[Driver]:
    """`call("cuMemFree", address)` is the result, with device 0's context current.

    Integers are passed as 64 bits wide: what the library takes of them is what it declares.
    """
    stand_in.load()
    library = ctypes.CDLL(str(stand_in.build()))
    versions = ("", "_v2")

    def entry(name: str) -> Driver:
        return next(getattr(library, name + v) for v in versions if hasattr(library, name + v))

    def call(name: str, *arguments: object) -> int:
        wide = [c_uint64(a) if isinstance(a, int) else a for a in arguments]
        return entry(name)(*wide)

    context = c_void_p()
    assert call("cuDevicePrimaryCtxRetain", byref(context), 0) == 0
    assert call("cuCtxPushCurrent", context) == 0
    yield call
    assert call("cuCtxPopCurrent", byref(context)) == 0


def reserve(call: Driver) -> c_uint64:
    address = c_uint64()
    assert call("cuMemAddressReserve", byref(address), UNIT, 0, 0, 0) == 0
    return address


def create(call: Driver, properties: Properties) -> c_uint64:
    handle = c_uint64()
    assert call("cuMemCreate", byref(handle), UNIT, byref(properties), 0) == 0
    return handle


def test_virtual_memory_has_an_order(call: Driver) -> None:
    address, handle = reserve(call), create(call, EXPORTABLE)
    access = Access(ON_DEVICE, READ_WRITE)
    assert call("cuMemSetAccess", address, UNIT, byref(access), 1) == INVALID_VALUE  # not mapped
    assert call("cuMemMap", address, UNIT, 0, handle.value + 1, 0) == INVALID_VALUE
    assert call("cuMemMap", address, 2 * UNIT, 0, handle, 0) == INVALID_VALUE
    assert call("cuMemMap", address, UNIT, 0, handle, 0) == 0
    assert call("cuMemMap", address, UNIT, 0, handle, 0) == INVALID_VALUE  # twice
    assert call("cuMemAddressFree", address, UNIT) == INVALID_VALUE  # still mapped
    assert call("cuMemFree", address) == INVALID_VALUE  # not allocated by cuMemAlloc
    assert call("cuIpcGetMemHandle", ctypes.create_string_buffer(64), address) == INVALID_VALUE
    assert call("cuMemRelease", handle) == 0  # the mapping keeps the memory
    assert call("cuMemRelease", handle) == INVALID_VALUE
    assert call("cuMemSetAccess", address, UNIT, byref(access), 1) == 0
    ctypes.memset(address.value, 1, UNIT)
    assert call("cuMemUnmap", address, UNIT) == 0
    assert call("cuMemUnmap", address, UNIT) == INVALID_VALUE
    assert call("cuMemAddressFree", address, UNIT) == 0
    assert call("cuMemAddressFree", address, UNIT) == INVALID_VALUE


def test_sizes_must_be_granular(call: Driver) -> None:
    out = c_uint64()
    assert call("cuMemCreate", byref(out), UNIT - 1, byref(EXPORTABLE), 0) == INVALID_VALUE
    assert call("cuMemAddressReserve", byref(out), UNIT + 512, 0, 0, 0) == INVALID_VALUE
    assert call("cuMemAlloc", byref(out), 0) == INVALID_VALUE


def test_only_what_was_made_for_it_can_be_exported(call: Driver) -> None:
    handle, fd = create(call, PRIVATE), c_int()
    export = "cuMemExportToShareableHandle"
    assert call(export, byref(fd), handle, 1, 0) == INVALID_VALUE
    assert call("cuMemRelease", handle) == 0
    assert call(export, byref(fd), handle, 1, 0) == INVALID_VALUE


def test_objects_are_freed_once(call: Driver) -> None:
    address, stream, event = c_uint64(), c_void_p(), c_void_p()
    host = ctypes.create_string_buffer(64)
    for make, undo, argument, again in [
        (("cuMemAlloc", byref(address), 8), "cuMemFree", address, INVALID_VALUE),
        (("cuMemHostAlloc", byref(address), 8, 1), "cuMemFreeHost", address, INVALID_VALUE),
        (("cuMemHostRegister", host, 64, 3), "cuMemHostUnregister", host, INVALID_VALUE),
        (("cuStreamCreate", byref(stream), 1), "cuStreamDestroy", stream, INVALID_HANDLE),
        (("cuEventCreate", byref(event), 2), "cuEventDestroy", event, INVALID_HANDLE),
    ]:
        assert call(*make) == 0
        assert call(undo, argument) == 0
        assert call(undo, argument) == again


def test_a_context_must_be_current(call: Driver) -> None:
    context, address = c_void_p(), c_uint64()
    assert call("cuCtxPopCurrent", byref(context)) == 0
    assert call("cuMemAlloc", byref(address), 8) == INVALID_CONTEXT
    assert call("cuCtxPopCurrent", byref(context)) == INVALID_CONTEXT
    assert call("cuCtxPushCurrent", context.value + 99) == INVALID_CONTEXT
    assert call("cuCtxPushCurrent", context) == 0


def test_host_memory_is_mapped_if_asked_for(call: Driver) -> None:
    host, address = ctypes.create_string_buffer(64), c_uint64()
    pointer = "cuMemHostGetDevicePointer"
    assert call(pointer, byref(address), host, 0) == INVALID_VALUE  # not registered
    assert call("cuMemHostRegister", host, 64, 1) == 0  # portable, but not mapped
    assert call(pointer, byref(address), host, 0) == INVALID_VALUE
    assert call("cuMemHostUnregister", host) == 0


def test_launches_must_fit(call: Driver) -> None:
    module, function, stream = c_void_p(), c_void_p(), c_void_p()
    assert call("cuModuleLoadData", byref(module), stand_in.image()) == 0
    assert call("cuModuleGetFunction", byref(function), module, b"none") == NOT_FOUND
    name = b"lora_refit_merge_bf16"
    assert call("cuModuleGetFunction", byref(function), module, name) == 0
    arguments = (c_void_p * 1)(ctypes.addressof(ctypes.create_string_buffer(200)))

    def launch(blocks: int, threads: int, shared: int) -> int:
        grid = (blocks, 1, 1, threads, 1, 1, shared)
        return call("cuLaunchKernel", function, *grid, stream, arguments, None)

    assert launch(0, 256, 0) == INVALID_VALUE
    assert launch(1, 1025, 0) == INVALID_VALUE
    assert launch(1, 256, 48 << 10 | 1) == INVALID_VALUE  # more has to be asked for
    assert call("cuFuncSetAttribute", function, 8, 228 << 10) == INVALID_VALUE
    assert call("cuFuncSetAttribute", function, 8, 64 << 10) == 0
    assert launch(1, 256, 64 << 10 | 1) == INVALID_VALUE


def test_captures_are_strict(call: Driver) -> None:
    stream, graph, event, address = c_void_p(), c_void_p(), c_void_p(), c_uint64()
    assert call("cuStreamBeginCapture", None, 1) == CAPTURE_UNSUPPORTED
    assert call("cuStreamCreate", byref(stream), 1) == 0
    assert call("cuEventCreate", byref(event), 2) == 0
    assert call("cuStreamEndCapture", stream, byref(graph)) == ILLEGAL_STATE
    for forbidden in [
        ("cuMemAlloc", byref(address), 8),
        ("cuStreamSynchronize", stream),
        ("cuEventSynchronize", event),
        ("cuEventQuery", event),
    ]:
        assert call("cuStreamBeginCapture", stream, 1) == 0
        assert call("cuStreamBeginCapture", stream, 1) == ILLEGAL_STATE
        assert call(*forbidden) == CAPTURE_UNSUPPORTED
        assert call("cuStreamEndCapture", stream, byref(graph)) == CAPTURE_INVALIDATED
    for handle, destroy in ((stream, "cuStreamDestroy"), (event, "cuEventDestroy")):
        assert call(destroy, handle) == 0


def test_nothing_moves_before_somebody_waits(call: Driver) -> None:
    address, stream, event = c_uint64(), c_void_p(), c_void_p()
    assert call("cuMemAlloc", byref(address), 8) == 0
    assert call("cuStreamCreate", byref(stream), 1) == 0
    assert call("cuEventCreate", byref(event), 2) == 0
    ctypes.memset(address.value, 7, 8)
    assert call("cuMemsetD8Async", address, 0, 8, stream) == 0
    assert call("cuEventRecord", event, stream) == 0
    assert ctypes.string_at(address.value, 8) == bytes([7] * 8)
    assert call("cuEventSynchronize", event) == 0
    assert ctypes.string_at(address.value, 8) == bytes(8)
    for destroy, handle in (
        ("cuMemFree", address),
        ("cuStreamDestroy", stream),
        ("cuEventDestroy", event),
    ):
        assert call(destroy, handle) == 0
