// What the copy kernel can do to elements on their way, by the variant of their tile.
#pragma once

#include "cuda/kernels.h"
#include "cuda/packet.cuh"

namespace lora_refit::cuda {

template <DType kSrc, DType kDst, Scaling kScaling>
struct Convert {
  static constexpr int kSrcBytes = element_bytes(kSrc);
  static constexpr int kDstBytes = element_bytes(kDst);
  static constexpr bool kZeros = false;

  template <int kElements>
  __device__ __forceinline__ static Packet<kElements * kDstBytes> apply(
      const Packet<kElements * kSrcBytes>& in, float scale) {
    if constexpr (kSrc == kDst && kScaling == Scaling::kNone) {
      return in;
    } else {
      Packet<kElements * kDstBytes> out = {};
#pragma unroll
      for (int i = 0; i < kElements; ++i) {
        const auto bits = convert<kSrc, kDst, kScaling>(get_element<kSrc>(in, i), scale);
        set_element<kDst>(out, i, bits);
      }
      return out;
    }
  }
};

template <int kBytes>
struct ZeroFill {
  static constexpr int kSrcBytes = kBytes;
  static constexpr int kDstBytes = kBytes;
  static constexpr bool kZeros = true;
};

// The inverse of copy_variant.
template <int kVariant>
struct VariantAt : Convert<static_cast<DType>(kVariant / kScalingCount / kDTypeCount),
                           static_cast<DType>(kVariant / kScalingCount % kDTypeCount),
                           static_cast<Scaling>(kVariant % kScalingCount)> {};
template <>
struct VariantAt<kZeroFillVariant2> : ZeroFill<2> {};
template <>
struct VariantAt<kZeroFillVariant4> : ZeroFill<4> {};

inline constexpr int kVariantCount = kZeroFillVariant4 + 1;

__device__ __forceinline__ int log2_element_bytes(int32_t dtype) {
  return element_bytes(static_cast<DType>(dtype)) == 4 ? 2 : 1;
}

// A zero fill has a source side too: one that is never read.
__device__ __forceinline__ int log2_src_bytes(int32_t variant) {
  if (variant >= kZeroFillVariant2) return variant == kZeroFillVariant2 ? 1 : 2;
  return log2_element_bytes(variant / kScalingCount / kDTypeCount);
}

__device__ __forceinline__ int log2_dst_bytes(int32_t variant) {
  if (variant >= kZeroFillVariant2) return log2_src_bytes(variant);
  return log2_element_bytes(variant / kScalingCount % kDTypeCount);
}

}  // namespace lora_refit::cuda
