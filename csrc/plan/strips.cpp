#include "plan/strips.h"

#include <algorithm>

namespace lora_refit {
namespace {

using cuda::kMergeCols;
using cuda::kMergeRows;
using cuda::MergeStrip;

int64_t divide_up(int64_t value, int64_t divisor) { return (value + divisor - 1) / divisor; }

// Tiles of kMergeRows x kMergeCols, the last ones of a row or column of them smaller.
int64_t tile_count(const std::vector<MergeBlock>& blocks) {
  int64_t tiles = 0;
  for (const MergeBlock& block : blocks) {
    tiles += divide_up(block.rows, kMergeRows) * divide_up(block.cols, kMergeCols);
  }
  return tiles;
}

// Cuts the columns of a block's rows into strips of at most `most` tiles, about equally long.
void append_strips(int32_t number, const MergeBlock& block, int64_t most,
                   std::vector<MergeStrip>& strips) {
  const int64_t tiles = divide_up(block.cols, kMergeCols);
  const int64_t parts = divide_up(tiles, most);
  for (int64_t row = 0; row < block.rows; row += kMergeRows) {
    const int64_t rows = std::min<int64_t>(kMergeRows, block.rows - row);
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t first = tiles * part / parts * kMergeCols;
      const int64_t end = std::min(tiles * (part + 1) / parts * kMergeCols, block.cols);
      strips.push_back({number, static_cast<int32_t>(rows), row, first, end - first});
    }
  }
}

}  // namespace

std::vector<MergeStrip> cut_into_strips(const std::vector<MergeBlock>& blocks,
                                        int64_t thread_blocks) {
  const int64_t wanted = 2 * std::max<int64_t>(1, thread_blocks);
  const int64_t most = std::max<int64_t>(1, tile_count(blocks) / wanted);
  std::vector<MergeStrip> strips;
  for (size_t i = 0; i < blocks.size(); ++i) {
    append_strips(static_cast<int32_t>(i), blocks[i], most, strips);
  }
  std::stable_sort(strips.begin(), strips.end(), [](const MergeStrip& a, const MergeStrip& b) {
    return a.rows * a.cols > b.rows * b.cols;
  });
  return strips;
}

}  // namespace lora_refit
