// What one run of a merge program moves.
#pragma once

#include <cstdint>
#include <vector>

#include "plan/used_buffers.h"

namespace lora_refit {

struct MergeTraffic {
  UsedBuffers sources;
  UsedBuffers destinations;
  int64_t bytes_read = 0;
  int64_t bytes_written = 0;
};

// Throws as check_merge does.
MergeTraffic check_and_measure_merge(const std::vector<MergeBlock>& blocks,
                                     const std::vector<MergeSegment>& segments,
                                     const std::vector<BufferShape>& sources,
                                     const std::vector<BufferShape>& destinations, int32_t modules);

}  // namespace lora_refit
