// The arithmetic of one merged element, and what a thread counts while it merges.
#pragma once

#include <cstdint>

#include "cuda/digest_parts.cuh"
#include "cuda/kernels.h"
#include "cuda/pairs.cuh"
#include "cuda/ptx.cuh"

namespace lora_refit::cuda {

// Of one strip, so of one destination and one module.
struct MergeTally {
  uint64_t digest = 0;
  float residual = 0;
  float products = 0;  // sum of (B @ A)^2
  uint32_t changed = 0;
};

// The chunk weights of the digest for the rows of one tile. A row's part of a tile is shorter than
// a chunk, so it lies in at most two, one even and one odd.
struct ChunkWeights {
  uint64_t of[kMergeRows][2];
};
static_assert(kMergeRows * 2 == kThreads && kMergeCols * 4 <= kChunkBytes);

// For a tile that begins at `byte` of the buffer of W', with `pitch` bytes from row to row. The
// table still holds what the tile before needed, which began `step` bytes earlier; 0 if there is
// none. All threads call it.
__device__ __forceinline__ void fill_chunk_weights(ChunkWeights& weights, int64_t byte,
                                                   int64_t pitch, int64_t step) {
  const int row = threadIdx.x / 2;
  const int parity = threadIdx.x % 2;
  const uint64_t at = static_cast<uint64_t>(byte + row * pitch);
  const uint64_t first = at / kChunkBytes;
  if (step != 0 && first == (at - step) / kChunkBytes) return;
  weights.of[row][parity] = chunk_weight(first + ((first ^ parity) & 1));
}

// scale * product + weight - sum, for that sum rounded to fp32. Exact but for a rounding of its own
// (Knuth's TwoSum, with the product unrounded).
__device__ __forceinline__ float rounding_error(float scale, float product, float weight,
                                                float sum) {
  const float delta_used = sum - weight;
  const float weight_used = sum - delta_used;
  return (weight - weight_used) + ptx::multiply_add(scale, product, -delta_used);
}

// W' of two elements: the sum in fp32, rounded once. `out` receives one word of a 2-byte W', two
// of fp32.
template <DType kWeight, DType kOut>
__device__ __forceinline__ void merge_pair(float2 weight, float2 product, float scale,
                                           uint32_t* out, MergeTally& tally) {
  const float2 sum = {ptx::multiply_add(scale, product.x, weight.x),
                      ptx::multiply_add(scale, product.y, weight.y)};
  float2 before = weight;
  float2 after = sum;
  float2 lost;
  if constexpr (kOut == DType::kF32) {
    out[0] = bits_of_float(sum.x);
    out[1] = bits_of_float(sum.y);
    lost = {rounding_error(scale, product.x, weight.x, sum.x),
            rounding_error(scale, product.y, weight.y, sum.y)};
  } else {
    out[0] = round_pair<kOut>(sum.x, sum.y);
    after = widen_pair<kOut>(out[0]);
    lost = {after.x - sum.x, after.y - sum.y};
    if (kWeight != kOut) before = widen_pair<kOut>(round_pair<kOut>(weight.x, weight.y));
  }
  tally.residual += lost.x * lost.x;
  tally.residual += lost.y * lost.y;
  tally.products += product.x * product.x;
  tally.products += product.y * product.y;
  tally.changed =
      ptx::add_if_different(tally.changed, bits_of_float(before.x), bits_of_float(after.x));
  tally.changed =
      ptx::add_if_different(tally.changed, bits_of_float(before.y), bits_of_float(after.y));
}

__device__ __forceinline__ double warp_sum(float value) {
  double sum = value;
#pragma unroll
  for (int lane_bits = kWarpThreads / 2; lane_bits > 0; lane_bits /= 2) {
    sum += __shfl_xor_sync(0xFFFFFFFFu, sum, lane_bits);
  }
  return sum;
}

// Adds what the warp counted to the destination's digest and the module's sums. All lanes call it.
__device__ __forceinline__ void add_tally(const MergeTally& tally, double scale, uint64_t* digest,
                                          MergeSums* sums) {
  add_warp_sum(digest, tally.digest);
  add_warp_sum(&sums->changed, tally.changed);
  const double residual = warp_sum(tally.residual);
  const double delta = warp_sum(tally.products) * scale * scale;
  if (threadIdx.x % kWarpThreads == 0) {
    ptx::add_f64(&sums->residual, residual);
    ptx::add_f64(&sums->delta, delta);
  }
}

}  // namespace lora_refit::cuda
