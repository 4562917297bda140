// Vectors of AVX2, F16C and FMA: casts as in convert.h, and the digest's weights.
#pragma once

#if defined(__x86_64__)

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "block.h"
#include "cpu/word_weights.h"

// Only these functions use the wider instructions: the rest of the extension runs anywhere.
#define LORA_REFIT_AVX2 __attribute__((target("avx2,f16c,fma"), always_inline)) inline
#define LORA_REFIT_AVX2_ENTRY __attribute__((target("avx2,f16c,fma")))

namespace lora_refit {

LORA_REFIT_AVX2 __m256i load_vector(const std::byte* address) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(address));
}

LORA_REFIT_AVX2 __m128i load_half_vector(const std::byte* address) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(address));
}

LORA_REFIT_AVX2 __m256i load_weights(int64_t word) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(&kWordWeights[word]));
}

// Eight words times their weights, summed into four lanes of 64 bits.
LORA_REFIT_AVX2 __m256i weigh_vector(__m256i words, int64_t first_word) {
  const __m256i even = _mm256_mul_epu32(words, load_weights(first_word));
  const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64(words, 32), load_weights(first_word + 1));
  return _mm256_add_epi64(even, odd);
}

LORA_REFIT_AVX2 uint64_t sum_lanes(__m256i lanes) {
  const __m128i two =
      _mm_add_epi64(_mm256_castsi256_si128(lanes), _mm256_extracti128_si256(lanes, 1));
  return static_cast<uint64_t>(_mm_extract_epi64(two, 0)) +
         static_cast<uint64_t>(_mm_extract_epi64(two, 1));
}

template <DType kDType>
LORA_REFIT_AVX2 __m256 load_floats(const std::byte* address) {
  if constexpr (kDType == DType::kF32) {
    return _mm256_castsi256_ps(load_vector(address));
  } else if constexpr (kDType == DType::kF16) {
    return _mm256_cvtph_ps(load_half_vector(address));
  } else {
    const __m256i wide = _mm256_cvtepu16_epi32(load_half_vector(address));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
  }
}

LORA_REFIT_AVX2 __m256i nans_of(__m256 values) {
  return _mm256_castps_si256(_mm256_cmp_ps(values, values, _CMP_UNORD_Q));
}

// The bf16 bits of eight floats, each in the high half of its lane; the low halves are garbage.
// A NaN becomes the high half of `if_nan`.
LORA_REFIT_AVX2 __m256i round_to_bf16(__m256 values, __m256i if_nan) {
  const __m256i bits = _mm256_castps_si256(values);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), odd);
  return _mm256_blendv_epi8(rounded, if_nan, nans_of(values));
}

LORA_REFIT_AVX2 __m256i round_to_bf16(__m256 values) {
  const __m256i quiet = _mm256_set1_epi32(0x00400000);
  return round_to_bf16(values, _mm256_or_si256(_mm256_castps_si256(values), quiet));
}

// The upper halves of the lanes.
LORA_REFIT_AVX2 __m256i pack_high_halves(__m256i low, __m256i high) {
  // packus works in 128-bit lanes, so the middle quarters come out swapped.
  const __m256i packed =
      _mm256_packus_epi32(_mm256_srli_epi32(low, 16), _mm256_srli_epi32(high, 16));
  return _mm256_permute4x64_epi64(packed, 0xD8);
}

LORA_REFIT_AVX2 __m128i round_to_f16(__m256 values) {
  return _mm256_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT);
}

template <DType kDType>
LORA_REFIT_AVX2 __m256 round_floats(__m256 values) {
  if constexpr (kDType == DType::kF32) {
    return values;
  } else if constexpr (kDType == DType::kF16) {
    return _mm256_cvtph_ps(round_to_f16(values));
  } else {
    const __m256i high = _mm256_set1_epi32(static_cast<int>(0xFFFF0000u));
    return _mm256_castsi256_ps(_mm256_and_si256(round_to_bf16(values), high));
  }
}

// Sixteen values, rounded to a 2-byte dtype.
template <DType kDst>
LORA_REFIT_AVX2 __m256i pack_halves(__m256 low, __m256 high) {
  if constexpr (kDst == DType::kF16) {
    return _mm256_inserti128_si256(_mm256_castsi128_si256(round_to_f16(low)), round_to_f16(high),
                                   1);
  } else {
    return pack_high_halves(round_to_bf16(low), round_to_bf16(high));
  }
}

LORA_REFIT_AVX2 void store_vector(std::byte* address, __m256i vector) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(address), vector);
}

LORA_REFIT_AVX2 void store_half_vector(std::byte* address, __m128i half) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(address), half);
}

}  // namespace lora_refit

#endif  // defined(__x86_64__)
