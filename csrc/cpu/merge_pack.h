// Converts parts of A and B to fp32, laid out as the merge kernels read them.
#pragma once

#include <cstdint>

#include "cpu/merge_kernels.h"
#include "cpu/row_kernels.h"

namespace lora_refit {

// A factor's source buffers, all of one dtype, and the kernel that converts them.
struct FactorSource {
  const uint64_t* addresses;
  DType dtype;
  RowsKernel widen;
};

// A of `segment` and of columns `col` to `col` + `cols` - 1, to k = `first` of panels of `depth`
// rows. The last panel's missing columns are left as they are.
void pack_a(const FactorSource& source, const MergeSegment& segment, int64_t col, int64_t cols,
            PanelRow* panels, int64_t depth, int64_t first);

// B of `segment` and of rows `row` to `row` + `rows` - 1, to k = `first` of rows of `depth`.
void pack_b(const FactorSource& source, const MergeSegment& segment, int64_t row, int64_t rows,
            float* packed, int64_t depth, int64_t first);

}  // namespace lora_refit
