// What the threads of a block share about the strip they work on.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/kernels.h"

namespace lora_refit::cuda {

// Lies in shared memory, not in each thread's registers.
struct StripWork {
  int32_t first_segment;
  int32_t segment_count;
  int64_t depth;  // K, the sum of the segments' ranks
  int64_t row;    // the strip's first, from the block's first
  int64_t col;
  int64_t cols;
  int32_t rows;
  int32_t dst_index;
  int32_t module;
  DType weight_dtype;
  DType dst_dtype;
  bool wide;  // 16-byte accesses are aligned, in memory and, for the digest, in the buffer of W'
  float scale;
  int64_t weight_pitch;  // bytes from row to row
  int64_t dst_pitch;
  const std::byte* weight;  // the strip's first row, at the block's first column
  std::byte* dst;           // base of the buffer
  int64_t dst_byte;         // of the same element in it
};

__device__ __forceinline__ StripWork prepare_strip(const MergeArguments& arguments,
                                                   const MergeStrip& strip) {
  const MergeBlock& block = arguments.blocks[strip.block];
  StripWork work;
  work.first_segment = block.first_segment;
  work.segment_count = block.segment_count;
  work.depth = 0;
  for (int i = 0; i < block.segment_count; ++i) {
    work.depth += arguments.segments[block.first_segment + i].rank;
  }
  work.row = strip.row;
  work.col = strip.col;
  work.cols = strip.cols;
  work.rows = strip.rows;
  work.dst_index = block.dst;
  work.module = block.module;
  work.weight_dtype = static_cast<DType>(arguments.src_dtypes[block.weight]);
  work.dst_dtype = static_cast<DType>(arguments.dst_dtypes[block.dst]);
  // Without segments D is -1 * +0, which leaves every W as it is, -0 too.
  work.scale = work.depth == 0 ? -1.0f : block.scale;

  const int64_t weight_bytes = element_bytes(work.weight_dtype);
  const int64_t dst_bytes = element_bytes(work.dst_dtype);
  const int64_t weight_first = block.weight_offset + strip.row * block.weight_row_stride;
  work.weight_pitch = block.weight_row_stride * weight_bytes;
  work.dst_pitch = block.dst_row_stride * dst_bytes;
  work.dst_byte = (block.dst_offset + strip.row * block.dst_row_stride) * dst_bytes;
  const uint64_t weight = arguments.src_addresses[block.weight] + weight_first * weight_bytes;
  const uint64_t dst = arguments.dst_addresses[block.dst];
  work.weight = reinterpret_cast<const std::byte*>(weight);
  work.dst = reinterpret_cast<std::byte*>(dst);
  work.wide = ((weight | work.weight_pitch | dst | work.dst_byte | work.dst_pitch) & 15) == 0;
  return work;
}

}  // namespace lora_refit::cuda
