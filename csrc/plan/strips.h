// Cuts merge blocks into strips, the work of one thread block of the merge kernel.
#pragma once

#include <cstdint>
#include <vector>

#include "cuda/kernels.h"

namespace lora_refit {

// `blocks` must have passed check_merge. Empty blocks vanish. A strip has all columns of its block
// unless that gives fewer strips than `strips_wanted`, or some far larger than others: then columns
// are cut too, in multiples of kMergeCols. The largest strips come first, so that thread blocks
// which take every n-th strip get about the same work.
std::vector<cuda::MergeStrip> cut_into_strips(const std::vector<MergeBlock>& blocks,
                                              int64_t strips_wanted);

}  // namespace lora_refit
