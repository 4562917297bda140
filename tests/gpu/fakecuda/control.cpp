#include "control.h"

#include <cstdlib>
#include <sstream>

#include "address_space.h"
#include "call.h"
#include "physical.h"

#define FAKECUDA_CONTROL extern "C" __attribute__((visibility("default")))

namespace fakecuda {
namespace {

Failure parse(const std::string& text) {
  Failure failure;
  std::istringstream fields(text);
  std::getline(fields, failure.call, ':');
  char colon = 0;
  fields >> failure.result >> colon >> failure.occurrence;
  return failure;
}

// Calls that restore what an earlier one changed for this thread.
bool puts_back(const std::string& call) {
  return call == "cuCtxPopCurrent" || call == "cuThreadExchangeStreamCaptureMode";
}

// The result of a control call lives until the thread's next one.
const char* returned(std::string text) {
  thread_local std::string kept;
  kept = std::move(text);
  return kept.c_str();
}

}  // namespace

Result Control::failure_of(const char* call) {
  const bool any = failure.call == "*" && !puts_back(call);
  if (failure.call != call && !any) return kSuccess;
  ++failure.seen;
  const bool now = failure.occurrence == 0 || failure.occurrence == failure.seen;
  return now ? failure.result : kSuccess;
}

Control& control() {
  static Control& all = *[] {
    Control* made = new Control;
    if (const char* failure = std::getenv("FAKECUDA_FAIL")) made->failure = parse(failure);
    return made;
  }();
  return all;
}

}  // namespace fakecuda

using namespace fakecuda;

// Replaces the failure that is to be injected; "" injects none.
FAKECUDA_CONTROL void fakecuda_fail(const char* text) {
  std::lock_guard<std::recursive_mutex> lock(state().mutex);
  control().failure = parse(text);
}

// The calls since the last time, one a line.
FAKECUDA_CONTROL const char* fakecuda_take_log() {
  std::lock_guard<std::recursive_mutex> lock(state().mutex);
  std::string text;
  for (const std::string& line : control().log) text += line + "\n";
  control().log.clear();
  return returned(text);
}

// What exists now, one "kind count" a line. Contexts and modules live as long as the process.
FAKECUDA_CONTROL const char* fakecuda_live() {
  std::lock_guard<std::recursive_mutex> lock(state().mutex);
  std::map<std::string, size_t> counts = address_space().counts();
  counts["physical memory"] = physical_memory().size();
  counts["stream"] = state().streams.size();
  counts["event"] = state().events.size();
  counts["graph"] = state().graphs.size() + state().executables.size();
  std::string text;
  for (const auto& [kind, count] : counts) {
    if (count > 0) text += kind + " " + std::to_string(count) + "\n";
  }
  return returned(text);
}

FAKECUDA_CONTROL const char* fakecuda_last_error() { return returned(control().last_error); }

FAKECUDA_CONTROL int fakecuda_context_depth() { return static_cast<int>(context_stack().size()); }

// From now on the driver is gone, as while the process exits.
FAKECUDA_CONTROL void fakecuda_shut_down() { state().shut_down = true; }
