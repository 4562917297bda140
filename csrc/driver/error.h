// What a failed driver call becomes: text that names the call, the CUDA error, the GPU, a remedy.
#pragma once

#include <stdexcept>
#include <string>

#include "driver/api.h"

namespace lora_refit::driver {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// `where` is the GPU's label, or empty for calls that concern none.
[[noreturn]] void fail(const Api& api, Result result, const char* call, const std::string& where);

inline void check(const Api& api, Result result, const char* call, const std::string& where) {
  if (result != kSuccess) fail(api, result, call, where);
}

}  // namespace lora_refit::driver
