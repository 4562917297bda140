// The frame of every entry point: log, injected failures, and the state that calls need.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "state.h"

#define FAKECUDA_ENTRY extern "C" __attribute__((visibility("default"))) Result

namespace fakecuda {

// Devices of the contexts that this thread has pushed; the last is current.
std::vector<int>& context_stack();

// Log the call. Throws Refusal where a test wants it to fail.
void announce(const char* name);
void log_result(Result result);

// Throws Refusal before cuInit, after shut_down, and in a forked child.
void require_initialised();

// The device of the current context. Throws Refusal where there is none, or it is lost.
Device& current_device();

// The capture mode of this thread; kCaptureRelaxed lets require_no_capture pass.
int& capture_mode();

// Ends the captures of this thread and throws Refusal if there are any: calls that synchronise or
// allocate are refused meanwhile.
void require_no_capture();

template <typename Body>
Result guarded(const char* name, const Body& body) {
  std::lock_guard<std::recursive_mutex> lock(state().mutex);
  Result result = kSuccess;
  try {
    announce(name);
    body();
  } catch (const Refusal& refusal) {
    result = refusal.result;
  }
  log_result(result);
  return result;
}

template <typename Body>
Result call(const char* name, const Body& body) {
  return guarded(name, [&] {
    require_initialised();
    body();
  });
}

template <typename Body>
Result call_in_context(const char* name, const Body& body) {
  return call(name, [&] { body(current_device()); });
}

}  // namespace fakecuda
