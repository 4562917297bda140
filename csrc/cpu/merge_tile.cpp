#include "cpu/merge_tile.h"

#include <algorithm>
#include <vector>

#include "cpu/merge_pack.h"

namespace lora_refit {
namespace {

// Columns whose products fit the first-level cache.
constexpr int64_t kGroupCols = 1024;

// Operands of a tile in fp32: all of A, and of B and the products as many rows as are made at once.
// Where a tile has fewer rows or columns, the rest is what earlier tiles left, and is never
// written.
struct Operands {
  std::vector<PanelRow> a;
  std::vector<float> b;
  PanelRow products[kProductRows * kGroupCols / kPanelCols];
};

int64_t divide_up(int64_t value, int64_t divisor) { return (value + divisor - 1) / divisor; }

// Grows with the largest tile of its thread, so that runs after the first allocate nothing.
thread_local Operands operands_of_thread;

FactorSource factor_source(const MergeTileJob& job) {
  const RowsKernel widen =
      find_rows_kernel(job.simd, job.dtypes.adapter, DType::kF32, Scaling::kNone);
  return {job.src_addresses, job.dtypes.adapter, widen};
}

// Calls visit(segment, first): `first` is where the segment's k begin among those of the block.
template <class Visit>
void for_each_segment(const MergeTileJob& job, Visit visit) {
  int64_t first = 0;
  for (int32_t i = 0; i < job.block.segment_count; ++i) {
    if (job.segments[i].rank == 0) continue;  // it may name no memory
    visit(job.segments[i], first);
    first += job.segments[i].rank;
  }
}

void load_a(const MergeTileJob& job, const FactorSource& source, int64_t panels,
            std::vector<PanelRow>& a) {
  const MergeTile& tile = job.tile;
  a.resize(std::max(a.size(), static_cast<size_t>(panels * tile.depth)));
  for_each_segment(job, [&](const MergeSegment& segment, int64_t first) {
    pack_a(source, segment, tile.col, tile.cols, a.data(), tile.depth, first);
  });
}

// Of rows of the tile from `row` on.
void load_b(const MergeTileJob& job, const FactorSource& source, int64_t row, int64_t rows,
            std::vector<float>& b) {
  const MergeTile& tile = job.tile;
  b.resize(std::max(b.size(), static_cast<size_t>(kProductRows * tile.depth)));
  for_each_segment(job, [&](const MergeSegment& segment, int64_t first) {
    pack_b(source, segment, tile.row + row, rows, b.data(), tile.depth, first);
  });
}

// A part of a tile, counted from its first row and column.
struct Part {
  int64_t row;
  int64_t rows;
  int64_t col;
  int64_t cols;
};

MergeRowsJob rows_job(const MergeTileJob& job, const PanelRow* products, const Part& part) {
  const MergeBlock& block = job.block;
  const int64_t row = job.tile.row + part.row;
  const int64_t col = job.tile.col + part.col;
  const int64_t weight_bytes = element_bytes(job.dtypes.weight);
  const int64_t dst_bytes = element_bytes(job.dtypes.dst);
  // Of a single row the strides are never used, and may be anything.
  const int64_t weight_row_stride = block.rows > 1 ? block.weight_row_stride : 0;
  const int64_t dst_row_stride = block.rows > 1 ? block.dst_row_stride : 0;
  const int64_t weight_position = block.weight_offset + row * weight_row_stride + col;
  const int64_t dst_position = block.dst_offset + row * dst_row_stride + col;
  const auto* weight = reinterpret_cast<const std::byte*>(job.src_addresses[block.weight]);
  // Without segments D is -1 * +0, which leaves every W as it is, -0 too.
  const float scale = job.tile.depth == 0 ? -1.0f : block.scale;
  return {products,
          divide_up(part.cols, kPanelCols),
          weight + weight_position * weight_bytes,
          job.dst + dst_position * dst_bytes,
          part.rows,
          part.cols,
          weight_row_stride * weight_bytes,
          dst_row_stride * dst_bytes,
          dst_position,
          dst_row_stride,
          scale};
}

}  // namespace

void merge_tile(const MergeTileJob& job, MergeTally& tally) {
  const MergeTile& tile = job.tile;
  const FactorSource source = factor_source(job);
  const MergeKernels kernels = find_merge_kernels(job.simd, job.dtypes.weight, job.dtypes.dst);
  Operands& operands = operands_of_thread;
  load_a(job, source, divide_up(tile.cols, kPanelCols), operands.a);
  for (int64_t row = 0; row < tile.rows; row += kProductRows) {
    const int64_t rows = std::min<int64_t>(kProductRows, tile.rows - row);
    load_b(job, source, row, rows, operands.b);
    for (int64_t col = 0; col < tile.cols; col += kGroupCols) {
      const int64_t cols = std::min(kGroupCols, tile.cols - col);
      const MergeRowsJob write = rows_job(job, operands.products, {row, rows, col, cols});
      const PanelRow* a = operands.a.data() + col / kPanelCols * tile.depth;
      kernels.multiply({operands.b.data(), a, tile.depth, divide_up(cols, kPanelCols),
                        operands.products, write.weight, static_cast<int>(rows),
                        write.weight_row_bytes, kPanelCols * element_bytes(job.dtypes.weight)});
      kernels.write(write, tally);
    }
  }
  kernels.settle();
}

}  // namespace lora_refit
