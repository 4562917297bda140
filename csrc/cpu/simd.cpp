#include "cpu/simd.h"

#include <cstdlib>
#include <stdexcept>
#include <string>

namespace lora_refit {

static bool cpu_has_avx2() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c") &&
         __builtin_cpu_supports("fma");
#else
  return false;
#endif
}

Simd choose_simd() {
  const char* variable = std::getenv("LORA_REFIT_SIMD");
  const std::string wanted = variable == nullptr ? "auto" : variable;
  if (wanted == "portable") return Simd::kPortable;
  if (wanted != "auto") {
    throw std::runtime_error("LORA_REFIT_SIMD=" + wanted +
                             " is not known; unset it or set it to auto or portable");
  }
  return cpu_has_avx2() ? Simd::kAvx2 : Simd::kPortable;
}

const char* simd_name(Simd simd) { return simd == Simd::kAvx2 ? "avx2" : "portable"; }

}  // namespace lora_refit
