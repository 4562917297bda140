// Finds libcuda at first use, and says why CUDA cannot be used where it cannot.
#pragma once

#include <string>

#include "driver/api.h"

namespace lora_refit::driver {

// The initialised driver. Throws Error where there is none, or where this process was forked from
// one that had initialised it.
const Api& api();

// The driver if this process has initialised it, else null. For destructors.
const Api* api_in_use() noexcept;

// Empty where api() works, else what is missing.
std::string why_unavailable();

}  // namespace lora_refit::driver
