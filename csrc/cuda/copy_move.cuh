// Moves the units that a warp has been dealt.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/copy_variants.cuh"
#include "cuda/digest_parts.cuh"
#include "cuda/packet.cuh"
#include "cuda/unit_walk.cuh"

namespace lora_refit::cuda {

// What a warp moves at a time: units of one size, all of one tile. It lives in shared memory, one
// for each warp, because all lanes need the same and registers are short.
struct Move {
  UnitWalk units;
  std::byte* dst;  // the base of the destination buffer
  float scale;
};

// Several units are in flight before the first is stored. Adds what the lane wrote to `sum`.
template <class Variant, int kElements>
__device__ __forceinline__ void move_units(const Move& move, const WordWeights& weights,
                                           DigestSum& sum) {
  constexpr int kSrcBytes = kElements * Variant::kSrcBytes;
  constexpr int kDstBytes = kElements * Variant::kDstBytes;
  constexpr int kInFlight = kSrcBytes > 16 ? 2 : 4;
  const uint32_t count = move.units.count;
  for (uint32_t unit = threadIdx.x % kWarpThreads; unit < count;) {
    Packet<kSrcBytes> in[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight && !Variant::kZeros; ++i) {
      // Past the end the last unit is read again: a load that may not happen would keep its
      // registers occupied all through the kernel.
      const uint32_t ahead = min(unit + i * kWarpThreads, count - 1);
      in[i] = load_packet<kSrcBytes>(move.units.source(ahead));
    }
#pragma unroll 1
    for (int i = 0; i < kInFlight && unit < count; ++i, unit += kWarpThreads) {
      const uint64_t byte = move.units.destination(unit);
      if constexpr (Variant::kZeros) {
        store_packet(move.dst + byte, Packet<kDstBytes>{});  // adds nothing to a digest
      } else {
        const auto out = Variant::template apply<kElements>(in[0], move.scale);
        store_packet(move.dst + byte, out);
        sum.add(byte / kChunkBytes, weigh(weights, out, byte));
#pragma unroll
        for (int next = 1; next < kInFlight; ++next) in[next - 1] = in[next];
      }
    }
  }
}

// The sizes of unit that a variant has: 16 bytes of the destination, a pair, and an element.
template <class Variant>
__device__ __forceinline__ void move_sized(int unit_elements, const Move& move,
                                           const WordWeights& weights, DigestSum& sum) {
  constexpr int kVector = 16 / Variant::kDstBytes;
  if (unit_elements == kVector) {
    move_units<Variant, kVector>(move, weights, sum);
  } else if (unit_elements == 1) {
    move_units<Variant, 1>(move, weights, sum);
  } else if constexpr (Variant::kDstBytes == 2) {
    move_units<Variant, 2>(move, weights, sum);
  }
}

// Finds the instantiation of a variant by bisection.
template <int kFirst = 0, int kCount = kVariantCount>
__device__ __forceinline__ void move_any(int variant, int unit_elements, const Move& move,
                                         const WordWeights& weights, DigestSum& sum) {
  constexpr int kHalf = kCount / 2;
  if constexpr (kCount == 1) {
    move_sized<VariantAt<kFirst>>(unit_elements, move, weights, sum);
  } else if (variant < kFirst + kHalf) {
    move_any<kFirst, kHalf>(variant, unit_elements, move, weights, sum);
  } else {
    move_any<kFirst + kHalf, kCount - kHalf>(variant, unit_elements, move, weights, sum);
  }
}

}  // namespace lora_refit::cuda
