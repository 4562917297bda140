// Brings B and A into shared memory, from any number of K-segments with any strides.
#pragma once

#include <cstdint>

#include "cuda/merge_shape.h"
#include "cuda/ptx.cuh"

namespace lora_refit::cuda {

template <DType kAdapter>
using AdapterBits = typename Element<kAdapter>::Bits;

// Where column `n` of a tile lies in a row of A in shared memory. Of the 32 columns of a warp,
// column 8q + 2j + e goes to 8j + 2q + e: an mma over the j-th eight of them gives lane q of a quad
// its outputs 2j and 2j + 1, so that a lane ends up with eight neighbours.
__device__ __forceinline__ int dealt_column(int n) {
  return n / kWarpCols * kWarpCols + n % 8 / 2 * 8 + n % kWarpCols / 8 * 2 + n % 2;
}

// Both operands are boxes of `n` x `k` elements: n counts rows of B, or columns of A.
template <DType kAdapter>
struct RowLayout {
  __device__ __forceinline__ static int at(int n, int k) {
    return n * MergeShape<kAdapter>::kRowPitch + k;
  }
};

template <DType kAdapter>
struct ColLayout {
  __device__ __forceinline__ static int at(int n, int k) {
    return k * MergeShape<kAdapter>::kColPitch + dealt_column(n);
  }
};

// A box of an operand in global memory; strides in elements.
struct OperandBox {
  const std::byte* first;
  int64_t n_stride;
  int64_t k_stride;
  int n;
  int k;
  int k_first;  // where its k begin in shared memory
};

// The part of a K-block that lies in one segment.
struct SegmentRun {
  const MergeSegment& segment;
  int64_t first;  // k in the segment
  int k_first;    // k in the K-block
  int k;
};

// Segments follow one another without gaps along K.
template <class Visit>
__device__ __forceinline__ void for_each_run(const MergeSegment* segments, int count,
                                             int64_t block_first, int block_depth, Visit visit) {
  int64_t segment_first = 0;
  for (int i = 0; i < count; ++i) {
    const int64_t rank = segments[i].rank;
    const int64_t skipped = block_first > segment_first ? block_first - segment_first : 0;
    const int64_t begin = segment_first + skipped - block_first;
    const int64_t room = block_depth - begin;
    const int64_t left = rank - skipped;
    const int64_t k = left < room ? left : room;
    if (k > 0) {
      visit(SegmentRun{segments[i], skipped, static_cast<int>(begin), static_cast<int>(k)});
    }
    segment_first += rank;
  }
}

template <DType kAdapter>
__device__ __forceinline__ AdapterBits<kAdapter> load_element(const std::byte* address) {
  if constexpr (kAdapter == DType::kF32) {
    return ptx::load_4(address);
  } else {
    return ptx::load_2(address);
  }
}

template <DType kAdapter>
__device__ __forceinline__ bool has_vectors(const OperandBox& box, int64_t pitch) {
  const uint64_t bytes = static_cast<uint64_t>(pitch) * MergeShape<kAdapter>::kBytes;
  return ((reinterpret_cast<uint64_t>(box.first) | bytes) & 15) == 0;
}

// Element by element; neighbouring threads go along the smaller stride.
template <DType kAdapter, class Layout>
__device__ __forceinline__ void stage_elements(AdapterBits<kAdapter>* tile, const OperandBox& box) {
  const uint64_t n_step = box.n_stride < 0 ? -box.n_stride : box.n_stride;
  const uint64_t k_step = box.k_stride < 0 ? -box.k_stride : box.k_stride;
  const bool along_k = k_step < n_step;
  const uint32_t per_outer = along_k ? box.k : box.n;
  for (uint32_t i = threadIdx.x; i < static_cast<uint32_t>(box.n * box.k); i += kThreads) {
    const int outer = static_cast<int>(i / per_outer);
    const int inner = static_cast<int>(i % per_outer);
    const int n = along_k ? outer : inner;
    const int k = along_k ? inner : outer;
    const int64_t source = n * box.n_stride + k * box.k_stride;
    tile[Layout::at(n, box.k_first + k)] =
        load_element<kAdapter>(box.first + source * MergeShape<kAdapter>::kBytes);
  }
}

// Zeroes `k_first` to `k_end`, so that a K that is no multiple of the mma's adds nothing.
template <DType kAdapter, class Layout>
__device__ __forceinline__ void stage_zeros(AdapterBits<kAdapter>* tile, int k_first, int k_end) {
  static_assert(kMergeRows == kMergeCols);
  for (int i = threadIdx.x; i < (k_end - k_first) * kMergeCols; i += kThreads) {
    tile[Layout::at(i % kMergeCols, k_first + i / kMergeCols)] = 0;
  }
}

// B: vectors run along K and go through asynchronous copies; the caller waits for them.
template <DType kAdapter>
__device__ __forceinline__ void stage_rows(AdapterBits<kAdapter>* tile, const OperandBox& box) {
  using Shape = MergeShape<kAdapter>;
  constexpr int kVector = Shape::kVector;
  const bool vectors = box.k_stride == 1 && box.k_first % kVector == 0 && box.k % kVector == 0 &&
                       has_vectors<kAdapter>(box, box.n_stride);
  if (!vectors) return stage_elements<kAdapter, RowLayout<kAdapter>>(tile, box);
  const uint32_t per_row = box.k / kVector;
  for (uint32_t i = threadIdx.x; i < box.n * per_row; i += kThreads) {
    const int n = static_cast<int>(i / per_row);
    const int k = static_cast<int>(i % per_row) * kVector;
    ptx::copy_async_16(tile + RowLayout<kAdapter>::at(n, box.k_first + k),
                       box.first + (n * box.n_stride + k) * Shape::kBytes);
  }
}

template <DType kAdapter>
__device__ __forceinline__ void store_dealt(AdapterBits<kAdapter>* to, uint4 v) {
  if constexpr (kAdapter == DType::kF32) {
    *reinterpret_cast<uint2*>(to) = uint2{v.x, v.y};
    *reinterpret_cast<uint2*>(to + 8) = uint2{v.z, v.w};
  } else {
    *reinterpret_cast<uint32_t*>(to) = v.x;
    *reinterpret_cast<uint32_t*>(to + 8) = v.y;
    *reinterpret_cast<uint32_t*>(to + 16) = v.z;
    *reinterpret_cast<uint32_t*>(to + 24) = v.w;
  }
}

// A: vectors run along the columns. A warp takes four rows of 128 bytes at a time, which spreads
// the dealt stores over all banks; several loads are in flight before the first store.
template <DType kAdapter>
__device__ __forceinline__ void stage_cols(AdapterBits<kAdapter>* tile, const OperandBox& box) {
  using Shape = MergeShape<kAdapter>;
  constexpr int kVector = Shape::kVector;
  constexpr int kAcross = kMergeCols / (8 * kVector);  // warps side by side
  constexpr int kTurn = kThreads / kWarpThreads / kAcross * 4;
  constexpr int kInFlight = 4;
  const bool vectors =
      box.n_stride == 1 && box.n % kVector == 0 && has_vectors<kAdapter>(box, box.k_stride);
  if (!vectors) return stage_elements<kAdapter, ColLayout<kAdapter>>(tile, box);
  const int lane = threadIdx.x % kWarpThreads;
  const int warp = threadIdx.x / kWarpThreads;
  const int n = (warp % kAcross * 8 + lane % 8) * kVector;
  if (n >= box.n) return;
  const int first = warp / kAcross * 4 + lane / 8;
  const std::byte* from = box.first + (n + first * box.k_stride) * Shape::kBytes;
  const int64_t step = kTurn * box.k_stride * Shape::kBytes;
  AdapterBits<kAdapter>* to = tile + ColLayout<kAdapter>::at(n, box.k_first + first);
#pragma unroll 1
  for (int k = first; k < box.k; k += kInFlight * kTurn) {
    uint4 v[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i, from += step) {
      if (k + i * kTurn < box.k) v[i] = ptx::load_16(from);
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i, to += kTurn * Shape::kColPitch) {
      if (k + i * kTurn < box.k) store_dealt<kAdapter>(to, v[i]);
    }
  }
}

}  // namespace lora_refit::cuda
