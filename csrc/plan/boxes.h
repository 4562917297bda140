// Cuts a block list into boxes of bounded size: the unit of work of every backend.
#pragma once

#include <cstdint>
#include <vector>

#include "convert.h"
#include "plan/block_check.h"

namespace lora_refit {

// A part of one normalised block, small enough for one turn of one thread, or of one warp.
struct Box {
  CopyBlock block;
  DType src_dtype;  // the destination's for a zero fill
  DType dst_dtype;
  Scaling scaling;
};

// True where the inner loop is contiguous on that side.
bool src_is_contiguous(const CopyBlock& block);
bool dst_is_contiguous(const CopyBlock& block);

int64_t element_count(const CopyBlock& block);

// `blocks` must have passed check_blocks. Empty blocks vanish. Each box holds at most
// `box_bytes` bytes of its destination, and at least one element.
std::vector<Box> cut_into_boxes(const std::vector<CopyBlock>& blocks,
                                const std::vector<BufferShape>& sources,
                                const std::vector<BufferShape>& destinations, int64_t box_bytes);

}  // namespace lora_refit
