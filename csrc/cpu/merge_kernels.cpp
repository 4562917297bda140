#include "cpu/merge_kernels.h"

#include "cpu/merge_avx2.h"
#include "cpu/merge_portable.h"

namespace lora_refit {

#if defined(__x86_64__)

MergeKernels find_merge_kernels(Simd simd, DType weight, DType dst) {
  return simd == Simd::kAvx2 ? avx2_merge_kernels(weight, dst)
                             : portable_merge_kernels(weight, dst);
}

#else

MergeKernels find_merge_kernels(Simd, DType weight, DType dst) {
  return portable_merge_kernels(weight, dst);
}

#endif

}  // namespace lora_refit
