// What the copy kernel can do to elements on their way, by the variant of their tile.
#pragma once

#include "cuda/kernels.h"
#include "cuda/packet.cuh"
#include "cuda/pairs.cuh"

namespace lora_refit::cuda {

// Two elements by the GPU's own instructions. They give the bits of convert.h, except for NaNs.
template <DType kSrc, DType kDst, Scaling kScaling>
__device__ __forceinline__ uint32_t convert_pair(float2 values, float scale) {
  if constexpr (kScaling == Scaling::kAfterCast && kSrc != kDst) {
    values = widen_pair<kDst>(round_pair<kDst>(values.x, values.y));
  }
  if constexpr (kScaling != Scaling::kNone) values = {values.x * scale, values.y * scale};
  return round_pair<kDst>(values.x, values.y);
}

// Whether neither of two elements is infinite or NaN: a full exponent carries into the sign.
template <DType kDType>
__device__ __forceinline__ bool finite_pair(uint32_t pair) {
  constexpr uint32_t kExponents = kDType == DType::kBF16 ? 0x7F807F80u : 0x7C007C00u;
  constexpr uint32_t kLowestBits = kDType == DType::kBF16 ? 0x00800080u : 0x04000400u;
  return (((pair & kExponents) + kLowestBits) & 0x80008000u) == 0;
}

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
      if constexpr (kDstBytes == 2 && kElements % 2 == 0) {
#pragma unroll
        for (int pair = 0; pair < kElements / 2; ++pair) {
          const float2 values = widen_pair_at<kSrc>(in.words, pair);
          out.words[pair] = convert_pair<kSrc, kDst, kScaling>(values, scale);
          if (!finite_pair<kDst>(out.words[pair])) {
            out.words[pair] = 0;
            convert_elements(out, in, scale, 2 * pair, 2);
          }
        }
      } else {
        convert_elements(out, in, scale, 0, kElements);
      }
      return out;
    }
  }

 private:
  // Bit by bit as on the CPU.
  template <int kInBytes, int kOutBytes>
  __device__ __forceinline__ static void convert_elements(Packet<kOutBytes>& out,
                                                          const Packet<kInBytes>& in, float scale,
                                                          int first, int count) {
#pragma unroll
    for (int i = first; i < first + count; ++i) {
      set_element<kDst>(out, i, convert<kSrc, kDst, kScaling>(get_element<kSrc>(in, i), scale));
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
