// The parts of the digest (block.h) that kernels share: its weights, a packet's share, the sum over
// a warp.
#pragma once

#include <cstdint>

#include "cuda/kernels.h"
#include "cuda/packet.cuh"
#include "digest_sum.h"

namespace lora_refit::cuda {

// The word weights in shared memory, as vectors so that a packet's come with one read.
struct WordWeights {
  uint4 vectors[kChunkWords / 4];

  __device__ __forceinline__ uint32_t* words() { return &vectors[0].x; }
  __device__ __forceinline__ const uint32_t* words() const { return &vectors[0].x; }
};

// All threads of the block call it, and may read the weights afterwards.
__device__ __forceinline__ void fill_word_weights(WordWeights& weights) {
  for (int i = threadIdx.x; i < kChunkWords; i += blockDim.x) weights.words()[i] = word_weight(i);
  __syncthreads();
}

// The sum of word * word_weight over a packet that lies at `byte` of its buffer. A packet of 2
// bytes is half a word; others begin at a word, and those of 16 bytes at a multiple of 16.
template <int kBytes>
__device__ __forceinline__ uint64_t weigh(const WordWeights& weights, const Packet<kBytes>& packet,
                                          uint64_t byte) {
  static_assert(kBytes <= 16);
  const uint32_t word = static_cast<uint32_t>(byte / 4 % kChunkWords);
  const uint32_t* w = packet.words;
  if constexpr (kBytes == 2) {
    return uint64_t{w[0] << (byte % 4 * 8)} * weights.words()[word];
  } else if constexpr (kBytes == 16) {
    const uint4 weight = weights.vectors[word / 4];
    return uint64_t{w[0]} * weight.x + uint64_t{w[1]} * weight.y + uint64_t{w[2]} * weight.z +
           uint64_t{w[3]} * weight.w;
  } else {
    uint64_t sum = 0;
#pragma unroll
    for (int i = 0; i < kBytes / 4; ++i) sum += uint64_t{w[i]} * weights.words()[word + i];
    return sum;
  }
}

// Adds the sum of `value` over the warp to `*digest`. All lanes call it.
__device__ __forceinline__ void add_warp_sum(uint64_t* digest, uint64_t value) {
#pragma unroll
  for (int lane_bits = kWarpThreads / 2; lane_bits > 0; lane_bits /= 2) {
    const uint32_t low = ptx::shuffle_xor(static_cast<uint32_t>(value), lane_bits);
    const uint32_t high = ptx::shuffle_xor(static_cast<uint32_t>(value >> 32), lane_bits);
    value += uint64_t{high} << 32 | low;
  }
  if (threadIdx.x % kWarpThreads == 0) ptx::add_u64(digest, value);
}

}  // namespace lora_refit::cuda
