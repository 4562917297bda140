#include "cpu/row_kernels.h"

#include "cpu/rows_avx2.h"
#include "cpu/rows_portable.h"

namespace lora_refit {

#if defined(__x86_64__)

RowsKernel find_rows_kernel(Simd simd, DType src, DType dst, Scaling scaling) {
  return simd == Simd::kAvx2 ? avx2_rows_kernel(src, dst, scaling)
                             : portable_rows_kernel(src, dst, scaling);
}

HalvesWeigher find_halves_weigher(Simd simd) {
  return simd == Simd::kAvx2 ? weigh_halves_avx2 : weigh_halves_portable;
}

#else

RowsKernel find_rows_kernel(Simd, DType src, DType dst, Scaling scaling) {
  return portable_rows_kernel(src, dst, scaling);
}

HalvesWeigher find_halves_weigher(Simd) { return weigh_halves_portable; }

#endif

}  // namespace lora_refit
