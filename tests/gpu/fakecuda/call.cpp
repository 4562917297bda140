#include "call.h"

#include <unistd.h>

#include <cstdlib>

#include "control.h"

namespace fakecuda {

State& state() {
  static State& all = *new State;
  return all;
}

std::vector<int>& context_stack() {
  thread_local std::vector<int> stack;
  return stack;
}

void announce(const char* name) {
  control().log.push_back(name);
  if (const Result injected = control().failure_of(name)) refuse(injected);
}

void log_result(Result result) {
  if (result != kSuccess) control().log.back() += "=" + std::to_string(result);
}

void require_initialised() {
  require(!state().shut_down, kErrorDeinitialized);
  require(state().process == getpid(), kErrorNotInitialized);
}

Device& current_device() {
  require(!context_stack().empty(), kErrorInvalidContext);
  Device& device = state().devices[context_stack().back()];
  require(device.lost == kSuccess, device.lost);
  return device;
}

int& capture_mode() {
  thread_local int mode = 0;
  return mode;
}

void require_no_capture() {
  if (capture_mode() == kCaptureRelaxed) return;
  bool capturing = false;
  for (auto& [handle, stream] : state().streams) {
    if (stream->capture == nullptr || stream->capturing_thread != gettid()) continue;
    stream->capture_invalidated = true;
    capturing = true;
  }
  require(!capturing, kErrorStreamCaptureUnsupported);
}

}  // namespace fakecuda
