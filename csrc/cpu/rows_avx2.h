#pragma once

#include "cpu/row_kernels.h"

namespace lora_refit {

RowsKernel avx2_rows_kernel(DType src, DType dst, Scaling scaling);
uint64_t weigh_halves_avx2(const std::byte* data, int64_t first, int64_t count);

}  // namespace lora_refit
