// Devices, contexts, peers, names of errors.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "call.h"
#include "device_facts.h"
#include "stream.h"

namespace fakecuda {
namespace {

int setting(const char* name, int otherwise) {
  const char* text = std::getenv(name);
  return text != nullptr ? std::atoi(text) : otherwise;
}

// Handles of contexts are device numbers, moved away from null.
ContextHandle handle_of(int device) {
  return reinterpret_cast<ContextHandle>(static_cast<uintptr_t>(device) + 0xC0);
}

Device& device_of(ContextHandle handle) {
  const uintptr_t number = reinterpret_cast<uintptr_t>(handle) - 0xC0;
  require(number < state().devices.size() && state().devices[number].retained,
          kErrorInvalidContext);
  return state().devices[number];
}

Device& device_at(int number) {
  require(number >= 0 && static_cast<size_t>(number) < state().devices.size(), kErrorInvalidDevice);
  return state().devices[number];
}

struct ErrorText {
  Result result;
  const char* name;
  const char* description;
};
constexpr ErrorText kErrorTexts[] = {
    {kSuccess, "CUDA_SUCCESS", "no error"},
    {kErrorInvalidValue, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {kErrorOutOfMemory, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {kErrorNotInitialized, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {kErrorDeinitialized, "CUDA_ERROR_DEINITIALIZED", "driver shutting down"},
    {kErrorNoDevice, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {kErrorInvalidDevice, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {kErrorInvalidImage, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {kErrorInvalidContext, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {kErrorMapFailed, "CUDA_ERROR_MAP_FAILED", "mapping of buffer object failed"},
    {kErrorNoBinaryForGpu, "CUDA_ERROR_NO_BINARY_FOR_GPU",
     "no kernel image is available for execution on the device"},
    {kErrorPeerAccessUnsupported, "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED",
     "peer access is not supported between these two devices"},
    {kErrorInvalidHandle, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {kErrorIllegalState, "CUDA_ERROR_ILLEGAL_STATE",
     "the operation cannot be performed in the present state"},
    {kErrorNotFound, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {kErrorNotReady, "CUDA_ERROR_NOT_READY", "device not ready"},
    {kErrorIllegalAddress, "CUDA_ERROR_ILLEGAL_ADDRESS",
     "an illegal memory access was encountered"},
    {kErrorPeerAccessAlreadyEnabled, "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED",
     "peer access is already enabled"},
    {kErrorHostMemoryAlreadyRegistered, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
     "part or all of the requested memory range is already mapped"},
    {kErrorLaunchFailed, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {kErrorStreamCaptureUnsupported, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
     "operation not permitted when stream is capturing"},
    {kErrorCaptureInvalidated, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
     "operation failed due to a previous error during capture"},
};

const ErrorText* text_of(Result result) {
  for (const ErrorText& text : kErrorTexts) {
    if (text.result == result) return &text;
  }
  return nullptr;
}

}  // namespace

Uuid uuid_of(int device) {
  Uuid uuid{};
  std::memcpy(uuid.bytes, "fakecuda", 8);
  uuid.bytes[15] = static_cast<unsigned char>(device);
  return uuid;
}

}  // namespace fakecuda

using namespace fakecuda;

// Neither needs a driver that is initialised, and neither is logged.
FAKECUDA_ENTRY cuGetErrorName(Result result, const char** name) {
  const ErrorText* text = text_of(result);
  *name = text != nullptr ? text->name : nullptr;
  return text != nullptr ? kSuccess : kErrorInvalidValue;
}

FAKECUDA_ENTRY cuGetErrorString(Result result, const char** description) {
  const ErrorText* text = text_of(result);
  *description = text != nullptr ? text->description : nullptr;
  return text != nullptr ? kSuccess : kErrorInvalidValue;
}

FAKECUDA_ENTRY cuInit(unsigned flags) {
  return guarded("cuInit", [&] {
    require(flags == 0, kErrorInvalidValue);
    require(!state().shut_down, kErrorDeinitialized);
    require(state().process == 0 || state().process == getpid(), kErrorNotInitialized);
    const int devices = setting("FAKECUDA_DEVICES", 2);
    require(devices > 0, kErrorNoDevice);
    if (state().process != 0) return;
    state().process = getpid();
    state().peer_access = setting("FAKECUDA_PEERS", 1) != 0;
    state().sm = setting("FAKECUDA_SM", 90);
    for (int number = 0; number < devices; ++number) {
      Device device{number};
      device.default_stream = std::make_shared<Stream>(Stream{number});
      device.default_stream->blocking = true;
      state().devices.push_back(std::move(device));
    }
  });
}

FAKECUDA_ENTRY cuDriverGetVersion(int* version) {
  return guarded("cuDriverGetVersion", [&] { *version = 13000; });
}

FAKECUDA_ENTRY cuDeviceGetCount(int* count) {
  return call("cuDeviceGetCount", [&] { *count = static_cast<int>(state().devices.size()); });
}

FAKECUDA_ENTRY cuDeviceGet(DeviceNumber* number, int ordinal) {
  return call("cuDeviceGet", [&] { *number = device_at(ordinal).number; });
}

FAKECUDA_ENTRY cuDeviceGetName(char* name, int bytes, DeviceNumber number) {
  return call("cuDeviceGetName", [&] {
    device_at(number);
    std::snprintf(name, static_cast<size_t>(bytes), "Stand-in GPU");
  });
}

FAKECUDA_ENTRY cuDeviceGetUuid_v2(Uuid* uuid, DeviceNumber number) {
  return call("cuDeviceGetUuid", [&] { *uuid = uuid_of(device_at(number).number); });
}

FAKECUDA_ENTRY cuDeviceTotalMem_v2(size_t* bytes, DeviceNumber number) {
  return call("cuDeviceTotalMem", [&] {
    device_at(number);
    *bytes = kMemoryBytes;
  });
}

FAKECUDA_ENTRY cuDeviceGetAttribute(int* value, int attribute, DeviceNumber number) {
  return call("cuDeviceGetAttribute", [&] {
    device_at(number);
    switch (attribute) {
      case kAttributeMultiprocessorCount:
        *value = kMultiprocessors;
        break;
      case kAttributeComputeCapabilityMajor:
        *value = state().sm / 10;
        break;
      case kAttributeComputeCapabilityMinor:
        *value = state().sm % 10;
        break;
      default:
        refuse(kErrorInvalidValue);
    }
  });
}

FAKECUDA_ENTRY cuDeviceCanAccessPeer(int* can, DeviceNumber number, DeviceNumber other) {
  return call("cuDeviceCanAccessPeer", [&] {
    device_at(number);
    device_at(other);
    *can = state().peer_access && number != other ? 1 : 0;
  });
}

FAKECUDA_ENTRY cuDevicePrimaryCtxRetain(ContextHandle* context, DeviceNumber number) {
  return call("cuDevicePrimaryCtxRetain", [&] {
    device_at(number).retained = true;
    *context = handle_of(number);
  });
}

FAKECUDA_ENTRY cuCtxPushCurrent_v2(ContextHandle context) {
  return call("cuCtxPushCurrent", [&] { context_stack().push_back(device_of(context).number); });
}

FAKECUDA_ENTRY cuCtxPopCurrent_v2(ContextHandle* context) {
  return call("cuCtxPopCurrent", [&] {
    require(!context_stack().empty(), kErrorInvalidContext);
    *context = handle_of(context_stack().back());
    context_stack().pop_back();
  });
}

FAKECUDA_ENTRY cuCtxEnablePeerAccess(ContextHandle peer, unsigned flags) {
  return call_in_context("cuCtxEnablePeerAccess", [&](Device& device) {
    const int other = device_of(peer).number;
    require(flags == 0, kErrorInvalidValue);
    require(state().peer_access && other != device.number, kErrorPeerAccessUnsupported);
    require(device.peers.insert(other).second, kErrorPeerAccessAlreadyEnabled);
  });
}
