// The part of B and A that lies in shared memory: all of a strip's B if K is small, else a K-block.
#pragma once

#include <cstdint>

#include "cuda/merge_stage.cuh"
#include "cuda/merge_strip.cuh"
#include "cuda/merge_write.cuh"

namespace lora_refit::cuda {

template <DType kAdapter>
struct Operands {
  using Shape = MergeShape<kAdapter>;
  using Bits = AdapterBits<kAdapter>;

  const MergeArguments& arguments;
  const StripWork& strip;

  __device__ __forceinline__ Bits* rows() const {
    return reinterpret_cast<Bits*>(ptx::dynamic_shared());
  }
  __device__ __forceinline__ Bits* cols() const {
    return reinterpret_cast<Bits*>(ptx::dynamic_shared() + Shape::kRowsBytes);
  }

  // Whether one K-block holds all, so that B is staged once for a strip.
  __device__ __forceinline__ bool b_stays() const { return strip.depth <= Shape::kDepth; }

  // Of the K-block that begins at `k`.
  __device__ __forceinline__ int depth(int64_t k) const {
    const int64_t left = strip.depth - k;
    return static_cast<int>(left < Shape::kDepth ? left : Shape::kDepth);
  }
  __device__ __forceinline__ int padded_depth(int64_t k) const {
    return (depth(k) + Shape::kStep - 1) / Shape::kStep * Shape::kStep;
  }

  // The strip's rows from `row` on, at most `most`.
  __device__ __forceinline__ void stage_b(int64_t k, int row, int most) const {
    const int count = strip.rows - row < most ? strip.rows - row : most;
    for_each_run(segments(), strip.segment_count, k, Shape::kDepth, [&](const SegmentRun& run) {
      const MergeSegment& s = run.segment;
      const int64_t offset =
          s.b_offset + (strip.row + row) * s.b_row_stride + run.first * s.b_k_stride;
      stage_rows<kAdapter>(
          rows(), {element(s.b, offset), s.b_row_stride, s.b_k_stride, count, run.k, run.k_first});
    });
    stage_zeros<kAdapter, RowLayout<kAdapter>>(rows(), depth(k), padded_depth(k));
  }

  __device__ __forceinline__ void stage_a(int64_t k, const Tile& tile) const {
    for_each_run(segments(), strip.segment_count, k, Shape::kDepth, [&](const SegmentRun& run) {
      const MergeSegment& s = run.segment;
      const int64_t offset = s.a_offset + tile.col * s.a_col_stride + run.first * s.a_k_stride;
      stage_cols<kAdapter>(cols(), {element(s.a, offset), s.a_col_stride, s.a_k_stride, tile.cols,
                                    run.k, run.k_first});
    });
    stage_zeros<kAdapter, ColLayout<kAdapter>>(cols(), depth(k), padded_depth(k));
  }

 private:
  __device__ __forceinline__ const MergeSegment* segments() const {
    return arguments.segments + strip.first_segment;
  }
  __device__ __forceinline__ const std::byte* element(int32_t buffer, int64_t offset) const {
    return reinterpret_cast<const std::byte*>(arguments.src_addresses[buffer]) +
           offset * Shape::kBytes;
  }
};

}  // namespace lora_refit::cuda
