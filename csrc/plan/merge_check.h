// Refuses merge programs that would touch memory outside their buffers.
#pragma once

#include <cstdint>
#include <vector>

#include "block.h"
#include "plan/block_check.h"

namespace lora_refit {

// Of the ranks of a block's segments together: so much of B and A must fit a CPU thread's memory.
inline constexpr int64_t kMostDepth = int64_t{1} << 20;

// Throws std::invalid_argument naming the first bad buffer, segment or block. Blocks number their
// modules from 0 to `modules` - 1. Blocks may overlap nowhere in their destinations; that is for
// the caller to see to, as it is that no destination shares memory with a source.
void check_merge(const std::vector<MergeBlock>& blocks, const std::vector<MergeSegment>& segments,
                 const std::vector<BufferShape>& sources,
                 const std::vector<BufferShape>& destinations, int32_t modules);

// Of A and B, and so of the kernel that merges: what all segments share. fp32 without segments.
// `segments` must have passed check_merge.
DType adapter_dtype(const std::vector<MergeSegment>& segments,
                    const std::vector<BufferShape>& sources);

}  // namespace lora_refit
