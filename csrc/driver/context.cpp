#include "driver/context.h"

namespace lora_refit::driver {
namespace {

// The device of this thread's innermost Context.
thread_local const Device* innermost = nullptr;

}  // namespace

Context::Context(const Device& device) : device_(device), api_(driver::api()), outer_(innermost) {
  if (outer_ == &device) return;
  call(&Api::cuCtxPushCurrent, device.primary_context());
  innermost = &device;
}

Context::~Context() {
  if (outer_ == &device_) return;
  innermost = outer_;
  ContextHandle popped = nullptr;
  result_of(&Api::cuCtxPopCurrent, &popped);
}

}  // namespace lora_refit::driver
