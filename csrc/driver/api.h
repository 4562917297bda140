// The part of the CUDA driver API that lora_refit uses, declared here so that the extension builds
// without a CUDA toolkit. Names and values are those of NVIDIA's cuda.h; a test compares them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lora_refit::driver {

using Result = int;  // CUresult
using DeviceNumber = int;
using DeviceAddress = unsigned long long;   // CUdeviceptr
using PhysicalHandle = unsigned long long;  // CUmemGenericAllocationHandle
using ContextHandle = struct ContextObject*;
using ModuleHandle = struct ModuleObject*;
using FunctionHandle = struct FunctionObject*;
using StreamHandle = struct StreamObject*;
using EventHandle = struct EventObject*;
using GraphHandle = struct GraphObject*;
using GraphExecHandle = struct GraphExecObject*;

struct Uuid {
  unsigned char bytes[16];
};

struct IpcHandle {  // CUipcMemHandle
  unsigned char bytes[64];
};

struct MemoryLocation {  // CUmemLocation
  int type;
  int id;
};

struct AllocationProperties {  // CUmemAllocationProp
  int type;
  int handle_types;
  MemoryLocation location;
  void* win32_metadata;
  unsigned char flags[8];
};

struct AccessDescription {  // CUmemAccessDesc
  MemoryLocation location;
  int flags;
};

inline constexpr Result kSuccess = 0;
inline constexpr Result kErrorInvalidValue = 1;
inline constexpr Result kErrorOutOfMemory = 2;
inline constexpr Result kErrorNotInitialized = 3;
inline constexpr Result kErrorDeinitialized = 4;
inline constexpr Result kErrorNoDevice = 100;
inline constexpr Result kErrorInvalidImage = 200;
inline constexpr Result kErrorInvalidContext = 201;
inline constexpr Result kErrorMapFailed = 205;
inline constexpr Result kErrorNoBinaryForGpu = 209;
inline constexpr Result kErrorPeerAccessUnsupported = 217;
inline constexpr Result kErrorUnsupportedPtxVersion = 222;
inline constexpr Result kErrorInvalidHandle = 400;
inline constexpr Result kErrorNotFound = 500;
inline constexpr Result kErrorNotReady = 600;
inline constexpr Result kErrorIllegalAddress = 700;
inline constexpr Result kErrorPeerAccessAlreadyEnabled = 704;
inline constexpr Result kErrorHostMemoryAlreadyRegistered = 712;
inline constexpr Result kErrorMisalignedAddress = 716;
inline constexpr Result kErrorLaunchFailed = 719;
inline constexpr Result kErrorStreamCaptureUnsupported = 900;

inline constexpr int kAttributeMultiprocessorCount = 16;
inline constexpr int kAttributeComputeCapabilityMajor = 75;
inline constexpr int kAttributeComputeCapabilityMinor = 76;
inline constexpr int kFunctionMaxDynamicSharedBytes = 8;
inline constexpr int kLocationDevice = 1;
inline constexpr int kAllocationPinned = 1;
inline constexpr int kHandlePosixFd = 1;
inline constexpr int kGranularityMinimum = 0;
inline constexpr int kAccessReadWrite = 3;
inline constexpr unsigned kIpcLazyPeerAccess = 1;
inline constexpr unsigned kHostAllocPortable = 1;
inline constexpr unsigned kHostRegisterPortable = 1;
inline constexpr unsigned kHostRegisterDeviceMap = 2;
inline constexpr unsigned kStreamNonBlocking = 1;
inline constexpr unsigned kEventDisableTiming = 2;
inline constexpr int kCaptureThreadLocal = 1;
inline constexpr int kCaptureRelaxed = 2;
inline constexpr int kCaptureNone = 0;

// One entry point: cuda.h's name, the library's symbol (cuda.h redirects many names to a later
// version), and the parameters. Every one returns a Result.
#define LORA_REFIT_DRIVER_CALLS(X)                                                                 \
  X(cuInit, "cuInit", unsigned)                                                                    \
  X(cuDriverGetVersion, "cuDriverGetVersion", int*)                                                \
  X(cuGetErrorName, "cuGetErrorName", Result, const char**)                                        \
  X(cuGetErrorString, "cuGetErrorString", Result, const char**)                                    \
  X(cuDeviceGetCount, "cuDeviceGetCount", int*)                                                    \
  X(cuDeviceGet, "cuDeviceGet", DeviceNumber*, int)                                                \
  X(cuDeviceGetName, "cuDeviceGetName", char*, int, DeviceNumber)                                  \
  X(cuDeviceGetUuid, "cuDeviceGetUuid_v2", Uuid*, DeviceNumber)                                    \
  X(cuDeviceTotalMem, "cuDeviceTotalMem_v2", size_t*, DeviceNumber)                                \
  X(cuDeviceGetAttribute, "cuDeviceGetAttribute", int*, int, DeviceNumber)                         \
  X(cuDeviceCanAccessPeer, "cuDeviceCanAccessPeer", int*, DeviceNumber, DeviceNumber)              \
  X(cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain", ContextHandle*, DeviceNumber)            \
  X(cuCtxPushCurrent, "cuCtxPushCurrent_v2", ContextHandle)                                        \
  X(cuCtxPopCurrent, "cuCtxPopCurrent_v2", ContextHandle*)                                         \
  X(cuCtxEnablePeerAccess, "cuCtxEnablePeerAccess", ContextHandle, unsigned)                       \
  X(cuModuleLoadData, "cuModuleLoadData", ModuleHandle*, const void*)                              \
  X(cuModuleGetFunction, "cuModuleGetFunction", FunctionHandle*, ModuleHandle, const char*)        \
  X(cuFuncSetAttribute, "cuFuncSetAttribute", FunctionHandle, int, int)                            \
  X(cuOccupancyMaxActiveBlocksPerMultiprocessor, "cuOccupancyMaxActiveBlocksPerMultiprocessor",    \
    int*, FunctionHandle, int, size_t)                                                             \
  X(cuLaunchKernel, "cuLaunchKernel", FunctionHandle, unsigned, unsigned, unsigned, unsigned,      \
    unsigned, unsigned, unsigned, StreamHandle, void**, void**)                                    \
  X(cuMemAlloc, "cuMemAlloc_v2", DeviceAddress*, size_t)                                           \
  X(cuMemFree, "cuMemFree_v2", DeviceAddress)                                                      \
  X(cuMemHostAlloc, "cuMemHostAlloc", void**, size_t, unsigned)                                    \
  X(cuMemFreeHost, "cuMemFreeHost", void*)                                                         \
  X(cuMemHostRegister, "cuMemHostRegister_v2", void*, size_t, unsigned)                            \
  X(cuMemHostUnregister, "cuMemHostUnregister", void*)                                             \
  X(cuMemHostGetDevicePointer, "cuMemHostGetDevicePointer_v2", DeviceAddress*, void*, unsigned)    \
  X(cuMemcpyHtoD, "cuMemcpyHtoD_v2", DeviceAddress, const void*, size_t)                           \
  X(cuMemcpyDtoH, "cuMemcpyDtoH_v2", void*, DeviceAddress, size_t)                                 \
  X(cuMemcpyHtoDAsync, "cuMemcpyHtoDAsync_v2", DeviceAddress, const void*, size_t, StreamHandle)   \
  X(cuMemcpyDtoHAsync, "cuMemcpyDtoHAsync_v2", void*, DeviceAddress, size_t, StreamHandle)         \
  X(cuMemsetD8Async, "cuMemsetD8Async", DeviceAddress, unsigned char, size_t, StreamHandle)        \
  X(cuIpcGetMemHandle, "cuIpcGetMemHandle", IpcHandle*, DeviceAddress)                             \
  X(cuIpcOpenMemHandle, "cuIpcOpenMemHandle_v2", DeviceAddress*, IpcHandle, unsigned)              \
  X(cuIpcCloseMemHandle, "cuIpcCloseMemHandle", DeviceAddress)                                     \
  X(cuMemGetAllocationGranularity, "cuMemGetAllocationGranularity", size_t*,                       \
    const AllocationProperties*, int)                                                              \
  X(cuMemCreate, "cuMemCreate", PhysicalHandle*, size_t, const AllocationProperties*,              \
    unsigned long long)                                                                            \
  X(cuMemRelease, "cuMemRelease", PhysicalHandle)                                                  \
  X(cuMemAddressReserve, "cuMemAddressReserve", DeviceAddress*, size_t, size_t, DeviceAddress,     \
    unsigned long long)                                                                            \
  X(cuMemAddressFree, "cuMemAddressFree", DeviceAddress, size_t)                                   \
  X(cuMemMap, "cuMemMap", DeviceAddress, size_t, size_t, PhysicalHandle, unsigned long long)       \
  X(cuMemUnmap, "cuMemUnmap", DeviceAddress, size_t)                                               \
  X(cuMemSetAccess, "cuMemSetAccess", DeviceAddress, size_t, const AccessDescription*, size_t)     \
  X(cuMemExportToShareableHandle, "cuMemExportToShareableHandle", void*, PhysicalHandle, int,      \
    unsigned long long)                                                                            \
  X(cuMemImportFromShareableHandle, "cuMemImportFromShareableHandle", PhysicalHandle*, void*, int) \
  X(cuStreamCreate, "cuStreamCreate", StreamHandle*, unsigned)                                     \
  X(cuStreamDestroy, "cuStreamDestroy_v2", StreamHandle)                                           \
  X(cuStreamSynchronize, "cuStreamSynchronize", StreamHandle)                                      \
  X(cuStreamWaitEvent, "cuStreamWaitEvent", StreamHandle, EventHandle, unsigned)                   \
  X(cuStreamIsCapturing, "cuStreamIsCapturing", StreamHandle, int*)                                \
  X(cuStreamBeginCapture, "cuStreamBeginCapture_v2", StreamHandle, int)                            \
  X(cuThreadExchangeStreamCaptureMode, "cuThreadExchangeStreamCaptureMode", int*)                  \
  X(cuStreamEndCapture, "cuStreamEndCapture", StreamHandle, GraphHandle*)                          \
  X(cuEventCreate, "cuEventCreate", EventHandle*, unsigned)                                        \
  X(cuEventDestroy, "cuEventDestroy_v2", EventHandle)                                              \
  X(cuEventRecord, "cuEventRecord", EventHandle, StreamHandle)                                     \
  X(cuEventQuery, "cuEventQuery", EventHandle)                                                     \
  X(cuEventSynchronize, "cuEventSynchronize", EventHandle)                                         \
  X(cuGraphInstantiate, "cuGraphInstantiateWithFlags", GraphExecHandle*, GraphHandle,              \
    unsigned long long)                                                                            \
  X(cuGraphLaunch, "cuGraphLaunch", GraphExecHandle, StreamHandle)                                 \
  X(cuGraphExecDestroy, "cuGraphExecDestroy", GraphExecHandle)                                     \
  X(cuGraphDestroy, "cuGraphDestroy", GraphHandle)

template <typename... Parameters>
struct Call {
  const char* name;
  const char* symbol;
  Result (*function)(Parameters...) = nullptr;
};

struct Api {
#define LORA_REFIT_DRIVER_MEMBER(name, symbol, ...) Call<__VA_ARGS__> name{#name, symbol};
  LORA_REFIT_DRIVER_CALLS(LORA_REFIT_DRIVER_MEMBER)
#undef LORA_REFIT_DRIVER_MEMBER
};

}  // namespace lora_refit::driver
