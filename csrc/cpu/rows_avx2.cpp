// Row kernels for AVX2 and F16C. Each step converts one 32-byte vector of the destination, stores
// it and adds it to the digest while it is still in a register.
#include "cpu/rows_avx2.h"

#if defined(__x86_64__)

#include <immintrin.h>

#include <algorithm>

#include "cpu/row_walk.h"
#include "cpu/rows_portable.h"

// Only these functions use the wider instructions: the rest of the extension runs anywhere.
#define LORA_REFIT_AVX2 __attribute__((target("avx2,f16c"), always_inline)) inline
#define LORA_REFIT_AVX2_ENTRY __attribute__((target("avx2,f16c")))

namespace lora_refit {
namespace {

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

// The bf16 bits of eight floats, each in the high half of its lane; the low halves are garbage.
LORA_REFIT_AVX2 __m256i round_to_bf16(__m256 values) {
  const __m256i bits = _mm256_castps_si256(values);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), odd);
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x00400000));
  const __m256 is_nan = _mm256_cmp_ps(values, values, _CMP_UNORD_Q);
  return _mm256_blendv_epi8(rounded, quiet, _mm256_castps_si256(is_nan));
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

// Eight source values, scaled, before their last rounding.
template <DType kSrc, DType kDst, Scaling kScaling>
LORA_REFIT_AVX2 __m256 scaled_floats(const std::byte* src, __m256 scale) {
  __m256 values = load_floats<kSrc>(src);
  if constexpr (kScaling == Scaling::kNone) return values;
  if constexpr (kScaling == Scaling::kAfterCast && kSrc != kDst) {
    values = round_floats<kDst>(values);
  }
  return _mm256_mul_ps(values, scale);
}

// Sixteen values, rounded to a 2-byte dtype.
template <DType kDst>
LORA_REFIT_AVX2 __m256i pack_halves(__m256 low, __m256 high) {
  if constexpr (kDst == DType::kF16) {
    return _mm256_inserti128_si256(_mm256_castsi128_si256(round_to_f16(low)), round_to_f16(high),
                                   1);
  } else {
    // packus works in 128-bit lanes, so the middle quarters come out swapped.
    const __m256i packed = _mm256_packus_epi32(_mm256_srli_epi32(round_to_bf16(low), 16),
                                               _mm256_srli_epi32(round_to_bf16(high), 16));
    return _mm256_permute4x64_epi64(packed, 0xD8);
  }
}

// The next 32 bytes of the destination.
template <DType kSrc, DType kDst, Scaling kScaling>
LORA_REFIT_AVX2 __m256i convert_vector(const std::byte* src, __m256 scale) {
  if constexpr (kSrc == kDst && kScaling == Scaling::kNone) {
    return load_vector(src);
  } else {
    const __m256 low = scaled_floats<kSrc, kDst, kScaling>(src, scale);
    if constexpr (kDst == DType::kF32) {
      return _mm256_castps_si256(low);
    } else {
      const std::byte* next = src + 8 * element_bytes(kSrc);
      return pack_halves<kDst>(low, scaled_floats<kSrc, kDst, kScaling>(next, scale));
    }
  }
}

// The next 16 bytes of a destination of 2-byte elements.
template <DType kSrc, DType kDst, Scaling kScaling>
LORA_REFIT_AVX2 __m128i convert_half_vector(const std::byte* src, __m256 scale) {
  if constexpr (kSrc == kDst && kScaling == Scaling::kNone) {
    return load_half_vector(src);
  } else {
    const __m256 low = scaled_floats<kSrc, kDst, kScaling>(src, scale);
    return _mm256_castsi256_si128(pack_halves<kDst>(low, _mm256_setzero_ps()));
  }
}

LORA_REFIT_AVX2 void store_vector(std::byte* address, __m256i vector) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(address), vector);
}

LORA_REFIT_AVX2 void store_half_vector(std::byte* address, __m128i half) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(address), half);
}

// One run inside one chunk; see walk_rows. Odd ends go through the portable run.
template <DType kSrcType, DType kDstType, Scaling kScaling>
struct Avx2Run {
  static constexpr DType kSrc = kSrcType;
  static constexpr DType kDst = kDstType;
  static constexpr int64_t kSrcBytes = element_bytes(kSrc);
  static constexpr int64_t kDstBytes = element_bytes(kDst);
  static constexpr int64_t kPerWord = 4 / kDstBytes;
  static constexpr int64_t kStep = 32 / kDstBytes;
  using Portable = PortableRun<kSrc, kDst, kScaling>;

  LORA_REFIT_AVX2_ENTRY static uint64_t move(const std::byte* src, std::byte* dst, int64_t first,
                                             int64_t count, float scale) {
    uint64_t weighted = 0;
    int64_t done = std::min(count, first % kPerWord);  // up to the next word
    if (done > 0) weighted += Portable::move(src, dst, first, done, scale);

    const __m256 scales = _mm256_set1_ps(scale);
    __m256i lanes = _mm256_setzero_si256();
    for (; done + kStep <= count; done += kStep) {
      const __m256i vector = convert_vector<kSrc, kDst, kScaling>(src + done * kSrcBytes, scales);
      store_vector(dst + done * kDstBytes, vector);
      lanes = _mm256_add_epi64(lanes, weigh_vector(vector, (first + done) / kPerWord));
    }
    if constexpr (kDstBytes == 2) {
      if (done + 8 <= count) {  // a whole row where the adapter's rank is 8
        const __m128i half =
            convert_half_vector<kSrc, kDst, kScaling>(src + done * kSrcBytes, scales);
        store_half_vector(dst + done * kDstBytes, half);
        const __m256i zero_extended = _mm256_inserti128_si256(_mm256_setzero_si256(), half, 0);
        lanes = _mm256_add_epi64(lanes, weigh_vector(zero_extended, (first + done) / kPerWord));
        done += 8;
      }
    }
    weighted += sum_lanes(lanes);

    if (done < count) {
      weighted += Portable::move(src + done * kSrcBytes, dst + done * kDstBytes, first + done,
                                 count - done, scale);
    }
    return weighted;
  }
};

}  // namespace

RowsKernel avx2_rows_kernel(DType src, DType dst, Scaling scaling) {
  return select_kernel<Avx2Run>(src, dst, scaling);
}

LORA_REFIT_AVX2_ENTRY uint64_t weigh_halves_avx2(const std::byte* data, int64_t first,
                                                 int64_t count) {
  const int64_t head = std::min(count, first % 2);
  uint64_t weighted = weigh_halves_portable(data, first, head);
  data += 2 * head, first += head, count -= head;

  __m256i lanes = _mm256_setzero_si256();
  const int64_t vectors = count / 16;
  for (int64_t i = 0; i < vectors; ++i) {
    lanes = _mm256_add_epi64(lanes, weigh_vector(load_vector(data + 32 * i), first / 2 + 8 * i));
  }
  weighted += sum_lanes(lanes);
  return weighted +
         weigh_halves_portable(data + 32 * vectors, first + 16 * vectors, count - 16 * vectors);
}

}  // namespace lora_refit

#endif  // defined(__x86_64__)
