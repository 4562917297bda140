// Driver calls on one device: its context is current for the scope of a Context.
#pragma once

#include "driver/device.h"
#include "driver/error.h"
#include "driver/library.h"

namespace lora_refit::driver {

// Leaves the thread's current context, which torch may have set, as it was. Within a Context
// another one of the same device costs nothing.
class Context {
 public:
  explicit Context(const Device& device);
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  // Throws Error.
  template <typename... Parameters, typename... Arguments>
  void call(Call<Parameters...> Api::* entry, Arguments... arguments) const {
    check((api_.*entry).function(arguments...), (api_.*entry).name);
  }

  template <typename... Parameters, typename... Arguments>
  Result result_of(Call<Parameters...> Api::* entry, Arguments... arguments) const {
    return (api_.*entry).function(arguments...);
  }

  void check(Result result, const char* call) const {
    if (result != kSuccess) fail(api_, result, call, device_.label());
  }

 private:
  const Device& device_;
  const Api& api_;
  const Device* outer_;  // of the Context that this one is within, if any
};

}  // namespace lora_refit::driver
