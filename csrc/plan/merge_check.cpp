#include "plan/merge_check.h"

#include <string>

#include "plan/checks.h"

namespace lora_refit {
namespace {

const char* const kDTypeNames[kDTypeCount] = {"fp32", "fp16", "bf16"};

void check_operand(const Item& item, const char* side, int32_t index, DType dtype,
                   const std::vector<BufferShape>& sources) {
  check_index(item, side, index, sources.size());
  if (sources[index].dtype != dtype) {
    refuse(item, std::string(side) + " buffer " + std::to_string(index) + " is " +
                     kDTypeNames[static_cast<int>(sources[index].dtype)] +
                     ", but A and B of this program begin with " +
                     kDTypeNames[static_cast<int>(dtype)] + "; all must share one dtype");
  }
}

void check_segment(const Item& item, const MergeSegment& segment, DType dtype,
                   const std::vector<BufferShape>& sources) {
  check_operand(item, "B", segment.b, dtype, sources);
  check_operand(item, "A", segment.a, dtype, sources);
  check_not_negative(item, "rank", segment.rank);
}

void check_depth(const Item& item, const MergeBlock& block,
                 const std::vector<MergeSegment>& segments) {
  int64_t depth = 0;
  for (int64_t i = block.first_segment; i < block.first_segment + block.segment_count; ++i) {
    if (segments[i].rank > kMostDepth - depth) {
      refuse(item, "the ranks of its segments add up to more than " + std::to_string(kMostDepth));
    }
    depth += segments[i].rank;
  }
}

// What `block` reads of its segments.
void check_reach(const MergeBlock& block, const std::vector<MergeSegment>& segments,
                 const std::vector<BufferShape>& sources) {
  for (int64_t i = block.first_segment; i < block.first_segment + block.segment_count; ++i) {
    const MergeSegment& segment = segments[i];
    if (segment.rank == 0) continue;
    const Item item = {"segment", static_cast<size_t>(i)};
    check_extent(item, "B", segment.b, segment.b_offset,
                 {{block.rows, segment.b_row_stride}, {segment.rank, segment.b_k_stride}}, sources);
    check_extent(item, "A", segment.a, segment.a_offset,
                 {{segment.rank, segment.a_k_stride}, {block.cols, segment.a_col_stride}}, sources);
  }
}

void check_segment_range(const Item& item, const MergeBlock& block, size_t segments) {
  const int64_t first = block.first_segment;
  const int64_t end = first + block.segment_count;
  if (first < 0 || block.segment_count < 0 || end > static_cast<int64_t>(segments)) {
    refuse(item, "segments " + std::to_string(first) + " to " + std::to_string(end - 1) +
                     " do not exist; there are " + std::to_string(segments));
  }
}

void check_block(const Item& item, const MergeBlock& block,
                 const std::vector<MergeSegment>& segments, const std::vector<BufferShape>& sources,
                 const std::vector<BufferShape>& destinations, int32_t modules) {
  check_index(item, "weight", block.weight, sources.size());
  check_index(item, "destination", block.dst, destinations.size());
  check_segment_range(item, block, segments.size());
  if (block.module < 0 || block.module >= modules) {
    refuse(item, "module " + std::to_string(block.module) + " does not exist; there are " +
                     std::to_string(modules));
  }
  check_finite_scale(item, block.scale);
  check_not_negative(item, "rows", block.rows);
  check_not_negative(item, "cols", block.cols);
  if (block.rows == 0 || block.cols == 0) return;

  if (block.rows > 1 && block.dst_row_stride == 0) {
    refuse(item, "destination row stride 0 writes the same elements more than once");
  }
  check_extent(item, "weight", block.weight, block.weight_offset,
               {{block.rows, block.weight_row_stride}, {block.cols, 1}}, sources);
  check_extent(item, "destination", block.dst, block.dst_offset,
               {{block.rows, block.dst_row_stride}, {block.cols, 1}}, destinations);
  check_depth(item, block, segments);
  check_reach(block, segments, sources);
}

}  // namespace

DType adapter_dtype(const std::vector<MergeSegment>& segments,
                    const std::vector<BufferShape>& sources) {
  return segments.empty() ? DType::kF32 : sources[segments[0].b].dtype;
}

void check_merge(const std::vector<MergeBlock>& blocks, const std::vector<MergeSegment>& segments,
                 const std::vector<BufferShape>& sources,
                 const std::vector<BufferShape>& destinations, int32_t modules) {
  check_buffers("source", sources);
  check_buffers("destination", destinations);
  if (!segments.empty()) check_index({"segment", 0}, "B", segments[0].b, sources.size());
  const DType dtype = adapter_dtype(segments, sources);
  for (size_t i = 0; i < segments.size(); ++i) {
    check_segment({"segment", i}, segments[i], dtype, sources);
  }
  for (size_t i = 0; i < blocks.size(); ++i) {
    check_block({"block", i}, blocks[i], segments, sources, destinations, modules);
  }
}

}  // namespace lora_refit
