#include "plan/merge_traffic.h"

#include "plan/merge_check.h"

namespace lora_refit {

MergeTraffic check_and_measure_merge(const std::vector<MergeBlock>& blocks,
                                     const std::vector<MergeSegment>& segments,
                                     const std::vector<BufferShape>& sources,
                                     const std::vector<BufferShape>& destinations,
                                     int32_t modules) {
  check_merge(blocks, segments, sources, destinations, modules);
  MergeTraffic traffic{{"source", sources}, {"destination", destinations}};
  const auto read = [&](int32_t buffer, int64_t elements) {
    if (elements == 0) return;
    traffic.sources.use(buffer);
    traffic.bytes_read += elements * element_bytes(sources[buffer].dtype);
  };
  for (const MergeBlock& block : blocks) {
    const int64_t elements = block.rows * block.cols;
    if (elements == 0) continue;
    read(block.weight, elements);
    traffic.destinations.use(block.dst);
    traffic.bytes_written += elements * element_bytes(destinations[block.dst].dtype);
    for (int32_t i = 0; i < block.segment_count; ++i) {
      const MergeSegment& segment = segments[block.first_segment + i];
      read(segment.b, block.rows * segment.rank);
      read(segment.a, segment.rank * block.cols);
    }
  }
  return traffic;
}

}  // namespace lora_refit
