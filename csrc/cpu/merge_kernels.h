// The inner loops of a merge: products of rows of B with columns of A, and their sums with W.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/simd.h"
#include "digest_sum.h"

namespace lora_refit {

// As many rows and columns of products as fit the registers of AVX2 while K advances.
inline constexpr int kProductRows = 6;
inline constexpr int kPanelCols = 16;

struct alignas(64) PanelRow {
  float values[kPanelCols];
};

// products[row][panel] is the sum over k of b[row][k] * a[panel][k], in the order of k from +0 on,
// one fused multiply-add for each k: every CPU computes the same bits.
struct ProductsJob {
  const float* b;     // [kProductRows][depth]
  const PanelRow* a;  // [panels][depth]: panels of kPanelCols columns
  int64_t depth;
  int64_t panels;
  PanelRow* products;  // [kProductRows][panels]
  // W where the products will be added to it, so that it can be fetched in time.
  const std::byte* weight;
  int weight_rows;
  int64_t weight_row_bytes;
  int64_t weight_panel_bytes;
};

// Rows of W and W', contiguous in both, at addresses of any alignment.
struct MergeRowsJob {
  const PanelRow* products;  // [rows][panels]
  int64_t panels;
  const std::byte* weight;
  std::byte* dst;
  int64_t rows;
  int64_t cols;
  int64_t weight_row_bytes;
  int64_t dst_row_bytes;
  int64_t dst_position;      // of the first element, in elements from the buffer's start
  int64_t dst_row_elements;  // dst_row_bytes in elements
  float scale;
};

// What a tile counts, so of one destination and one module.
struct MergeTally {
  DigestSum digest;
  double residual = 0;
  double products = 0;  // sum of (B @ A)^2
  uint64_t changed = 0;
};

struct MergeKernels {
  void (*multiply)(const ProductsJob&);
  void (*write)(const MergeRowsJob&, MergeTally&);  // W' must not overlap W
  void (*settle)();  // orders what was written before what this thread stores next
};

MergeKernels find_merge_kernels(Simd simd, DType weight, DType dst);

}  // namespace lora_refit
