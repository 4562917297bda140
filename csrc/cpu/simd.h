// Which instruction set the row kernels use.
#pragma once

namespace lora_refit {

enum class Simd { kPortable, kAvx2 };

// The best path this CPU has. LORA_REFIT_SIMD=portable in the environment forces the fallback and
// is read at each call. Throws std::runtime_error for a value other than "portable" and "auto".
Simd choose_simd();

const char* simd_name(Simd simd);

}  // namespace lora_refit
