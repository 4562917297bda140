// Row kernels for AVX2 and F16C. Each step converts one 32-byte vector of the destination, stores
// it and adds it to the digest while it is still in a register.
#include "cpu/rows_avx2.h"

#if defined(__x86_64__)

#include <algorithm>

#include "cpu/avx2.h"
#include "cpu/row_walk.h"
#include "cpu/rows_portable.h"

namespace lora_refit {
namespace {

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
