#include "cpu/merge_tiles.h"

#include <algorithm>

#include "cpu/merge_kernels.h"

namespace lora_refit {
namespace {

// A of a tile stays in the second-level cache, beside the products and W of a few rows.
constexpr int64_t kPanelBytes = 128 * 1024;
constexpr int64_t kMostCols = 2048;

// Enough rows to repay the conversion of A, few enough to share a small weight among threads.
constexpr int64_t kTileElements = 512 * 1024;
constexpr int64_t kMostRows = 1020;

int64_t divide_up(int64_t value, int64_t divisor) { return (value + divisor - 1) / divisor; }

int64_t depth_of(const MergeBlock& block, const std::vector<MergeSegment>& segments) {
  int64_t depth = 0;
  for (int32_t i = 0; i < block.segment_count; ++i) {
    depth += segments[block.first_segment + i].rank;
  }
  return depth;
}

// About equal parts of at most `most`, which is a multiple of `unit`, each but the last too.
int64_t part_length(int64_t length, int64_t most, int64_t unit) {
  const int64_t parts = divide_up(length, most);
  return divide_up(divide_up(length, parts), unit) * unit;
}

void append_tiles(int32_t number, const MergeBlock& block, int64_t depth,
                  std::vector<MergeTile>& tiles) {
  const int64_t row_bytes = static_cast<int64_t>(sizeof(PanelRow)) * std::max<int64_t>(1, depth);
  const int64_t panels = std::max<int64_t>(1, kPanelBytes / row_bytes);
  const int64_t cols =
      part_length(block.cols, std::min(panels * kPanelCols, kMostCols), kPanelCols);
  const int64_t most_rows = std::min(kTileElements / cols / kProductRows * kProductRows, kMostRows);
  const int64_t rows = part_length(block.rows, most_rows, kProductRows);
  for (int64_t row = 0; row < block.rows; row += rows) {
    for (int64_t col = 0; col < block.cols; col += cols) {
      tiles.push_back({number, depth, row, std::min(rows, block.rows - row), col,
                       std::min(cols, block.cols - col)});
    }
  }
}

}  // namespace

std::vector<MergeTile> cut_into_merge_tiles(const std::vector<MergeBlock>& blocks,
                                            const std::vector<MergeSegment>& segments) {
  std::vector<MergeTile> tiles;
  for (size_t i = 0; i < blocks.size(); ++i) {
    if (blocks[i].rows == 0 || blocks[i].cols == 0) continue;
    append_tiles(static_cast<int32_t>(i), blocks[i], depth_of(blocks[i], segments), tiles);
  }
  return tiles;
}

}  // namespace lora_refit
