// Cuts merge blocks into tiles, the work that a thread claims at a time.
#pragma once

#include <cstdint>
#include <vector>

#include "block.h"

namespace lora_refit {

// A rectangle of one block, counted from the block's first row and column.
struct MergeTile {
  int32_t block;
  int64_t depth;  // of its segments together
  int64_t row;
  int64_t rows;
  int64_t col;
  int64_t cols;
};

// The arguments must have passed check_merge. Empty blocks vanish.
std::vector<MergeTile> cut_into_merge_tiles(const std::vector<MergeBlock>& blocks,
                                            const std::vector<MergeSegment>& segments);

}  // namespace lora_refit
