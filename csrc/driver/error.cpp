#include "driver/error.h"

namespace lora_refit::driver {
namespace {

const char* remedy(Result result) {
  switch (result) {
    case kErrorOutOfMemory:
      return "free memory on this GPU, or lower the engine's gpu_memory_utilization";
    case kErrorNotInitialized:
      return "CUDA cannot be used in a process that was forked after its parent used it; "
             "start workers with the spawn method";
    case kErrorNoDevice:
      return "no GPU is visible; check nvidia-smi and CUDA_VISIBLE_DEVICES";
    case kErrorInvalidImage:
    case kErrorNoBinaryForGpu:
    case kErrorUnsupportedPtxVersion:
      return "this build has no kernels that this GPU and driver can run; update the driver, or "
             "rebuild lora_refit for this GPU";
    case kErrorInvalidContext:
      return "an IPC handle cannot be opened in the process that exported it, and a stream belongs "
             "to one GPU";
    case kErrorMapFailed:
      return "the exporting process must be alive, on this machine and visible from this container";
    case kErrorPeerAccessUnsupported:
      return "these two GPUs cannot read each other's memory; use host shared memory instead";
    case kErrorIllegalAddress:
    case kErrorMisalignedAddress:
    case kErrorLaunchFailed:
      return "a kernel touched memory that is freed, unmapped or on a GPU without peer access; "
             "this "
             "process's CUDA context is lost, restart it";
    case kErrorHostMemoryAlreadyRegistered:
      return "this host memory is registered already; close the other mapping first";
    case kErrorStreamCaptureUnsupported:
      return "this cannot be done while a stream is capturing; run once before capturing";
    default:
      return "see the CUDA driver API's description of this error";
  }
}

}  // namespace

void fail(const Api& api, Result result, const char* call, const std::string& where) {
  const char* name = nullptr;
  const char* description = nullptr;
  api.cuGetErrorName.function(result, &name);
  api.cuGetErrorString.function(result, &description);
  std::string text = call;
  text += " failed";
  if (!where.empty()) text += " on " + where;
  text += ": " + (name != nullptr ? std::string(name) : "CUDA error " + std::to_string(result));
  if (description != nullptr) text += " (" + std::string(description) + ")";
  throw Error(text + "; " + remedy(result));
}

}  // namespace lora_refit::driver
