// Which instruction set the row kernels use.
#pragma once

namespace lora_refit {

enum class Simd { kPortable, kAvx2 };

// The best path this CPU has. LORA_REFIT_SIMD=portable in the environment forces the fallback and
// is read at each call; any other value than "portable" or "auto" is refused.
Simd choose_simd();

const char* simd_name(Simd simd);

}  // namespace lora_refit
