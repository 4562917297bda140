// csrc/driver/api.h against NVIDIA's cuda.h: compiles only where they agree.
#include "driver/api.h"

// After api.h: it redirects names of calls by macros.
#include <cuda.h>

#include <cstddef>
#include <string_view>
#include <type_traits>

namespace lora_refit::driver {
namespace {

namespace ours = lora_refit::driver;

template <typename T, typename = void>
inline constexpr size_t kPointedBytes = 0;  // not a pointer, or to something opaque
template <typename T>
inline constexpr size_t kPointedBytes<T*, std::void_t<decltype(sizeof(T))>> =
    std::is_void_v<T> ? 0 : sizeof(T);

template <typename Ours, typename Theirs>
constexpr bool passed_alike() {
  return sizeof(Ours) == sizeof(Theirs) && alignof(Ours) == alignof(Theirs) &&
         std::is_pointer_v<Ours> == std::is_pointer_v<Theirs> &&
         std::is_class_v<Ours> == std::is_class_v<Theirs> &&
         kPointedBytes<Ours> == kPointedBytes<Theirs>;
}

template <typename... Ours, typename... Theirs>
constexpr bool same_parameters(CUresult (*)(Theirs...)) {
  if constexpr (sizeof...(Ours) == sizeof...(Theirs)) {
    return (passed_alike<Ours, Theirs>() && ...);
  } else {
    return false;
  }
}

#define TEXT_OF(expanded) #expanded
#define TEXT(name) TEXT_OF(name)
#define CHECK_CALL(name, symbol, ...)                                       \
  static_assert(std::string_view(TEXT(name)) == symbol, "another version"); \
  static_assert(same_parameters<__VA_ARGS__>(&::name), "other parameters of " symbol);
LORA_REFIT_DRIVER_CALLS(CHECK_CALL)

static_assert(sizeof(ours::Result) == sizeof(CUresult));
static_assert(std::is_same_v<ours::DeviceNumber, CUdevice>);
static_assert(std::is_same_v<ours::DeviceAddress, CUdeviceptr>);
static_assert(std::is_same_v<ours::PhysicalHandle, CUmemGenericAllocationHandle>);

#define CHECK_SIZE(our, their) static_assert(sizeof(ours::our) == sizeof(their))
CHECK_SIZE(Uuid, CUuuid);
CHECK_SIZE(IpcHandle, CUipcMemHandle);
CHECK_SIZE(MemoryLocation, CUmemLocation);
CHECK_SIZE(AllocationProperties, CUmemAllocationProp);
CHECK_SIZE(AccessDescription, CUmemAccessDesc);

#define CHECK_FIELD(our, our_field, their, their_field)                           \
  static_assert(offsetof(ours::our, our_field) == offsetof(their, their_field) && \
                sizeof(ours::our::our_field) == sizeof(their::their_field))
CHECK_FIELD(MemoryLocation, type, CUmemLocation, type);
CHECK_FIELD(MemoryLocation, id, CUmemLocation, id);
CHECK_FIELD(AllocationProperties, type, CUmemAllocationProp, type);
CHECK_FIELD(AllocationProperties, handle_types, CUmemAllocationProp, requestedHandleTypes);
CHECK_FIELD(AllocationProperties, location, CUmemAllocationProp, location);
CHECK_FIELD(AllocationProperties, win32_metadata, CUmemAllocationProp, win32HandleMetaData);
CHECK_FIELD(AllocationProperties, flags, CUmemAllocationProp, allocFlags);
CHECK_FIELD(AccessDescription, location, CUmemAccessDesc, location);
CHECK_FIELD(AccessDescription, flags, CUmemAccessDesc, flags);

#define CHECK_VALUE(our, their) static_assert(static_cast<int>(ours::our) == their)
CHECK_VALUE(kSuccess, CUDA_SUCCESS);
CHECK_VALUE(kErrorInvalidValue, CUDA_ERROR_INVALID_VALUE);
CHECK_VALUE(kErrorOutOfMemory, CUDA_ERROR_OUT_OF_MEMORY);
CHECK_VALUE(kErrorNotInitialized, CUDA_ERROR_NOT_INITIALIZED);
CHECK_VALUE(kErrorDeinitialized, CUDA_ERROR_DEINITIALIZED);
CHECK_VALUE(kErrorNoDevice, CUDA_ERROR_NO_DEVICE);
CHECK_VALUE(kErrorInvalidImage, CUDA_ERROR_INVALID_IMAGE);
CHECK_VALUE(kErrorInvalidContext, CUDA_ERROR_INVALID_CONTEXT);
CHECK_VALUE(kErrorMapFailed, CUDA_ERROR_MAP_FAILED);
CHECK_VALUE(kErrorNoBinaryForGpu, CUDA_ERROR_NO_BINARY_FOR_GPU);
CHECK_VALUE(kErrorPeerAccessUnsupported, CUDA_ERROR_PEER_ACCESS_UNSUPPORTED);
CHECK_VALUE(kErrorUnsupportedPtxVersion, CUDA_ERROR_UNSUPPORTED_PTX_VERSION);
CHECK_VALUE(kErrorInvalidHandle, CUDA_ERROR_INVALID_HANDLE);
CHECK_VALUE(kErrorNotFound, CUDA_ERROR_NOT_FOUND);
CHECK_VALUE(kErrorNotReady, CUDA_ERROR_NOT_READY);
CHECK_VALUE(kErrorIllegalAddress, CUDA_ERROR_ILLEGAL_ADDRESS);
CHECK_VALUE(kErrorPeerAccessAlreadyEnabled, CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED);
CHECK_VALUE(kErrorHostMemoryAlreadyRegistered, CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
CHECK_VALUE(kErrorMisalignedAddress, CUDA_ERROR_MISALIGNED_ADDRESS);
CHECK_VALUE(kErrorLaunchFailed, CUDA_ERROR_LAUNCH_FAILED);
CHECK_VALUE(kErrorStreamCaptureUnsupported, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
CHECK_VALUE(kAttributeMultiprocessorCount, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
CHECK_VALUE(kAttributeComputeCapabilityMajor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
CHECK_VALUE(kAttributeComputeCapabilityMinor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
CHECK_VALUE(kFunctionMaxDynamicSharedBytes, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES);
CHECK_VALUE(kLocationDevice, CU_MEM_LOCATION_TYPE_DEVICE);
CHECK_VALUE(kAllocationPinned, CU_MEM_ALLOCATION_TYPE_PINNED);
CHECK_VALUE(kHandlePosixFd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
CHECK_VALUE(kGranularityMinimum, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
CHECK_VALUE(kAccessReadWrite, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
CHECK_VALUE(kIpcLazyPeerAccess, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
CHECK_VALUE(kHostAllocPortable, CU_MEMHOSTALLOC_PORTABLE);
CHECK_VALUE(kHostRegisterPortable, CU_MEMHOSTREGISTER_PORTABLE);
CHECK_VALUE(kHostRegisterDeviceMap, CU_MEMHOSTREGISTER_DEVICEMAP);
CHECK_VALUE(kStreamNonBlocking, CU_STREAM_NON_BLOCKING);
CHECK_VALUE(kEventDisableTiming, CU_EVENT_DISABLE_TIMING);
CHECK_VALUE(kCaptureThreadLocal, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
CHECK_VALUE(kCaptureRelaxed, CU_STREAM_CAPTURE_MODE_RELAXED);
CHECK_VALUE(kCaptureNone, CU_STREAM_CAPTURE_STATUS_NONE);

}  // namespace
}  // namespace lora_refit::driver
