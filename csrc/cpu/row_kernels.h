// Kernels that move rows of contiguous elements: cast, scale and digest in one pass.
#pragma once

#include <cstddef>
#include <cstdint>

#include "convert.h"
#include "cpu/simd.h"
#include "cpu/word_weights.h"
#include "digest_sum.h"

namespace lora_refit {

// `rows` runs of `cols` elements, contiguous on both sides. Addresses may have any alignment.
struct RowsJob {
  const std::byte* src;
  std::byte* dst;
  int64_t rows;
  int64_t cols;
  int64_t src_row_bytes;  // from one row to the next; may be zero or negative
  int64_t dst_row_bytes;
  int64_t dst_position;      // of the first element, in elements from the buffer's start
  int64_t dst_row_elements;  // dst_row_bytes in elements
  float scale;
};

using RowsKernel = void (*)(const RowsJob&, DigestSum&);

// The sum of word * word_weight over `count` elements of 2 bytes that lie inside one chunk; the
// first of them is element `first` of the chunk.
using HalvesWeigher = uint64_t (*)(const std::byte* data, int64_t first, int64_t count);

RowsKernel find_rows_kernel(Simd simd, DType src, DType dst, Scaling scaling);
HalvesWeigher find_halves_weigher(Simd simd);

}  // namespace lora_refit
