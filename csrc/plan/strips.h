// Cuts merge blocks into strips, the work of one thread block of the merge kernel.
#pragma once

#include <cstdint>
#include <vector>

#include "cuda/kernels.h"

namespace lora_refit {

// `blocks` must have passed check_merge. Empty blocks vanish. A strip has all columns of its block
// unless that is more than half of what each of `thread_blocks` would do: then columns are cut too,
// in multiples of kMergeCols. The largest strips come first, so that thread blocks which take every
// n-th strip get about the same work.
std::vector<cuda::MergeStrip> cut_into_strips(const std::vector<MergeBlock>& blocks,
                                              int64_t thread_blocks);

}  // namespace lora_refit
