// Two neighbouring elements at a time, by the GPU's conversion instructions.
#pragma once

#include <cstdint>

#include "convert.h"
#include "cuda/ptx.cuh"

namespace lora_refit::cuda {

// To a 2-byte dtype, the first in the low half. A NaN becomes 0x7FFF.
template <DType kDType>
__device__ __forceinline__ uint32_t round_pair(float first, float second) {
  if constexpr (kDType == DType::kF16) {
    return ptx::round_f16x2(first, second);
  } else {
    return ptx::round_bf16x2(first, second);
  }
}

template <DType kDType>
__device__ __forceinline__ float2 widen_pair(uint32_t pair) {
  if constexpr (kDType == DType::kF16) {
    return ptx::widen_f16x2(pair);
  } else {
    return {float_from_bits(pair << 16), float_from_bits(pair & 0xFFFF0000u)};
  }
}

// Elements 2 * pair and 2 * pair + 1 of `words`.
template <DType kDType>
__device__ __forceinline__ float2 widen_pair_at(const uint32_t* words, int pair) {
  if constexpr (kDType == DType::kF32) {
    return {float_from_bits(words[2 * pair]), float_from_bits(words[2 * pair + 1])};
  } else {
    return widen_pair<kDType>(words[pair]);
  }
}

}  // namespace lora_refit::cuda
