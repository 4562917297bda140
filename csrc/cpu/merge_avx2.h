#pragma once

#include "cpu/merge_kernels.h"

namespace lora_refit {

MergeKernels avx2_merge_kernels(DType weight, DType dst);

}  // namespace lora_refit
