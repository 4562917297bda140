// Merge kernels for AVX2, F16C and FMA.
#include "cpu/merge_avx2.h"

#if defined(__x86_64__)

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "cpu/avx2.h"
#include "cpu/merge_portable.h"
#include "cpu/merge_walk.h"

namespace lora_refit {
namespace {

static_assert(kPanelCols == 16, "a panel's row is two vectors");

// W is fetched while products are made, so that it is near when they are added to it.
LORA_REFIT_AVX2 void prefetch_weights(const ProductsJob& job, int64_t panel) {
  const std::byte* weight = job.weight + panel * job.weight_panel_bytes;
  for (int row = 0; row < job.weight_rows; ++row, weight += job.weight_row_bytes) {
    _mm_prefetch(reinterpret_cast<const char*>(weight), _MM_HINT_T0);
  }
}

LORA_REFIT_AVX2 void multiply_panel(const ProductsJob& job, int64_t panel) {
  const float* b = job.b;
  const PanelRow* a = job.a + panel * job.depth;
  __m256 sums[kProductRows][2];
  for (auto& row : sums) row[0] = row[1] = _mm256_setzero_ps();
  for (int64_t k = 0; k < job.depth; ++k) {
    const __m256 left = _mm256_load_ps(a[k].values);
    const __m256 right = _mm256_load_ps(a[k].values + 8);
#pragma GCC unroll 6
    for (int row = 0; row < kProductRows; ++row) {
      const __m256 factor = _mm256_broadcast_ss(b + row * job.depth + k);
      sums[row][0] = _mm256_fmadd_ps(factor, left, sums[row][0]);
      sums[row][1] = _mm256_fmadd_ps(factor, right, sums[row][1]);
    }
  }
  PanelRow* products = job.products + panel;
#pragma GCC unroll 6
  for (int row = 0; row < kProductRows; ++row, products += job.panels) {
    _mm256_store_ps(products->values, sums[row][0]);
    _mm256_store_ps(products->values + 8, sums[row][1]);
  }
}

LORA_REFIT_AVX2_ENTRY void multiply(const ProductsJob& job) {
  for (int64_t panel = 0; panel < job.panels; ++panel) {
    prefetch_weights(job, panel);
    multiply_panel(job, panel);
  }
}

LORA_REFIT_AVX2 double sum_floats(__m256 values) {
  const __m256d doubles = _mm256_add_pd(_mm256_cvtps_pd(_mm256_castps256_ps128(values)),
                                        _mm256_cvtps_pd(_mm256_extractf128_ps(values, 1)));
  const __m128d two =
      _mm_add_pd(_mm256_castpd256_pd128(doubles), _mm256_extractf128_pd(doubles, 1));
  return _mm_cvtsd_f64(_mm_add_sd(two, _mm_unpackhi_pd(two, two)));
}

// Of eight elements: what rounding loses, and B @ A, squared and added up.
struct VectorSums {
  __m256 residual;
  __m256 products;
};

LORA_REFIT_AVX2 __m256 rounding_errors(__m256 scale, __m256 products, __m256 weights, __m256 sums) {
  const __m256 delta_used = _mm256_sub_ps(sums, weights);
  const __m256 weight_used = _mm256_sub_ps(sums, delta_used);
  return _mm256_add_ps(_mm256_sub_ps(weights, weight_used),
                       _mm256_fmsub_ps(scale, products, delta_used));
}

// Eight sums of W and D, none of them a NaN, rounded to W' dtype: bf16 in the upper halves of its
// lanes, fp16 in the lower 128 bits, and in `after` as floats.
template <DType kOut>
LORA_REFIT_AVX2 __m256i round_sums(__m256 sums, __m256& after) {
  const __m256i bits = _mm256_castps_si256(sums);
  if constexpr (kOut == DType::kF32) {
    after = sums;
    return bits;
  } else if constexpr (kOut == DType::kF16) {
    const __m128i halves = round_to_f16(sums);
    after = _mm256_cvtph_ps(halves);
    return _mm256_castsi128_si256(halves);
  } else {
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i half = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF));
    const __m256i rounded = _mm256_add_epi32(bits, half);
    const __m256i high = _mm256_set1_epi32(static_cast<int>(0xFFFF0000u));
    after = _mm256_castsi256_ps(_mm256_and_si256(rounded, high));
    return rounded;
  }
}

template <DType kOut>
LORA_REFIT_AVX2 __m256i merge_vector(__m256 weights, const float* from, __m256 scale,
                                     VectorSums& total) {
  const __m256 products = _mm256_loadu_ps(from);
  const __m256 sums = _mm256_fmadd_ps(scale, products, weights);
  __m256 after;
  const __m256i rounded = round_sums<kOut>(sums, after);
  const __m256 lost = kOut == DType::kF32 ? rounding_errors(scale, products, weights, sums)
                                          : _mm256_sub_ps(after, sums);
  total.residual = _mm256_fmadd_ps(lost, lost, total.residual);
  total.products = _mm256_fmadd_ps(products, products, total.products);
  return rounded;
}

// Adds -1 to each lane, of the width of W' elements, that is equal in both vectors.
template <DType kOut>
LORA_REFIT_AVX2 __m256i count_equal(__m256i total, __m256i before, __m256i after) {
  if constexpr (kOut == DType::kF32) {
    return _mm256_add_epi32(total, _mm256_cmpeq_epi32(before, after));
  } else {
    return _mm256_add_epi16(total, _mm256_cmpeq_epi16(before, after));
  }
}

LORA_REFIT_AVX2 int64_t sum_ints(__m256i lanes) {
  const __m256i low = _mm256_cvtepi32_epi64(_mm256_castsi256_si128(lanes));
  const __m256i high = _mm256_cvtepi32_epi64(_mm256_extracti128_si256(lanes, 1));
  return static_cast<int64_t>(sum_lanes(_mm256_add_epi64(low, high)));
}

template <DType kOut>
LORA_REFIT_AVX2 int64_t sum_counts(__m256i lanes) {
  if constexpr (kOut != DType::kF32) lanes = _mm256_madd_epi16(lanes, _mm256_set1_epi16(1));
  return sum_ints(lanes);
}

// W' is not read again soon: past the caches its lines need not be fetched before they are written.
LORA_REFIT_AVX2 void write_vector(std::byte* address, __m256i vector, bool aligned) {
  if (aligned) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(address), vector);
  } else {
    store_vector(address, vector);
  }
}

void settle() { _mm_sfence(); }

// One run inside one chunk of the digest; see walk_merge_rows. Odd ends go through the portable
// run, and all of a run that has NaNs: vectors would not give them the portable run's bits.
template <DType kWeightType, DType kOutType>
struct Avx2MergeRun {
  static constexpr DType kWeight = kWeightType;
  static constexpr DType kOut = kOutType;
  static constexpr int64_t kWeightBytes = element_bytes(kWeight);
  static constexpr int64_t kOutBytes = element_bytes(kOut);
  static constexpr int64_t kPerWord = 4 / kOutBytes;
  static constexpr int64_t kStep = 32 / kOutBytes;
  using Portable = PortableMergeRun<kWeight, kOut>;

  LORA_REFIT_AVX2_ENTRY static uint64_t write(const std::byte* weight, const float* products,
                                              std::byte* dst, int64_t first, int64_t count,
                                              float scale, MergeTally& tally) {
    const auto portable = [&](int64_t from, int64_t length) {
      return Portable::write(weight + from * kWeightBytes, products + from, dst + from * kOutBytes,
                             first + from, length, scale, tally);
    };
    const int64_t begin = std::min(count, first % kPerWord);  // of the first whole word
    const int64_t end = count - (count - begin) % kStep;
    const uint64_t odd_ends = portable(0, begin) + portable(end, count - end);

    const __m256 scales = _mm256_set1_ps(scale);
    const bool aligned = reinterpret_cast<uintptr_t>(dst + begin * kOutBytes) % 32 == 0;
    VectorSums total = {_mm256_setzero_ps(), _mm256_setzero_ps()};
    __m256i lanes = _mm256_setzero_si256();
    __m256i equal = _mm256_setzero_si256();
    for (int64_t done = begin; done < end; done += kStep) {
      __m256i before;
      const __m256i after =
          merge_step(weight + done * kWeightBytes, products + done, scales, total, before);
      write_vector(dst + done * kOutBytes, after, aligned);
      equal = count_equal<kOut>(equal, before, after);
      lanes = _mm256_add_epi64(lanes, weigh_vector(after, (first + done) / kPerWord));
    }
    const double residual = sum_floats(total.residual);
    if (std::isnan(residual)) return odd_ends + portable(begin, end - begin);
    tally.residual += residual;
    tally.products += sum_floats(total.products);
    tally.changed += static_cast<uint64_t>(end - begin + sum_counts<kOut>(equal));
    return odd_ends + sum_lanes(lanes);
  }

 private:
  // The next 32 bytes of W', and in `before` those of W cast to its dtype.
  LORA_REFIT_AVX2 static __m256i merge_step(const std::byte* weight, const float* products,
                                            __m256 scale, VectorSums& total, __m256i& before) {
    const __m256 low = load_floats<kWeight>(weight);
    const __m256i low_after = merge_vector<kOut>(low, products, scale, total);
    if constexpr (kOut == DType::kF32) {
      before = _mm256_castps_si256(low);
      return low_after;
    } else {
      const __m256 high = load_floats<kWeight>(weight + 8 * kWeightBytes);
      const __m256i high_after = merge_vector<kOut>(high, products + 8, scale, total);
      before = kWeight == kOut ? load_vector(weight) : pack_halves<kOut>(low, high);
      if constexpr (kOut == DType::kBF16) return pack_high_halves(low_after, high_after);
      return _mm256_inserti128_si256(low_after, _mm256_castsi256_si128(high_after), 1);
    }
  }
};

}  // namespace

MergeKernels avx2_merge_kernels(DType weight, DType dst) {
  return {multiply, select_merge_writer<Avx2MergeRun>(weight, dst), settle};
}

}  // namespace lora_refit

#endif  // defined(__x86_64__)
