#pragma once

#include <cmath>
#include <cstring>

#include "convert.h"
#include "cpu/merge_kernels.h"
#include "cpu/rows_portable.h"

namespace lora_refit {

MergeKernels portable_merge_kernels(DType weight, DType dst);

// What any NaN becomes, as on GPUs: instruction sets disagree on which operand's NaN they pass on.
inline constexpr uint32_t kMergedNan = 0x7FFFFFFFu;

inline float merged_sum(float scale, float product, float weight) {
  const float sum = std::fma(scale, product, weight);
  return sum == sum ? sum : float_from_bits(kMergedNan);
}

// scale * product + weight - sum, for that sum rounded to fp32. Exact but for a rounding of its own
// (Knuth's TwoSum, with the product unrounded).
inline float rounding_error(float scale, float product, float weight, float sum) {
  const float delta_used = sum - weight;
  const float weight_used = sum - delta_used;
  return (weight - weight_used) + std::fma(scale, product, -delta_used);
}

// One run inside one chunk of the digest; see walk_merge_rows.
template <DType kWeightType, DType kOutType>
struct PortableMergeRun {
  static constexpr DType kWeight = kWeightType;
  static constexpr DType kOut = kOutType;
  using From = Element<kWeight>;
  using To = Element<kOut>;

  static uint64_t write(const std::byte* weight, const float* products, std::byte* dst,
                        int64_t first, int64_t count, float scale, MergeTally& tally) {
    for (int64_t i = 0; i < count; ++i) {
      const auto before = load<typename From::Bits>(weight + i * sizeof(typename From::Bits));
      const typename To::Bits after = merge(before, products[i], scale, tally);
      std::memcpy(dst + i * sizeof after, &after, sizeof after);
    }
    if constexpr (kOut == DType::kF32) return weigh_words_portable(dst, first, count);
    return weigh_halves_portable(dst, first, count);
  }

 private:
  static typename To::Bits merge(typename From::Bits before, float product, float scale,
                                 MergeTally& tally) {
    const float weight = From::to_float(before);
    const float sum = merged_sum(scale, product, weight);
    const typename To::Bits after = To::from_float(sum);
    double lost;
    if constexpr (kOut == DType::kF32) {
      lost = rounding_error(scale, product, weight, sum);
    } else {
      lost = To::to_float(after) - sum;
    }
    tally.residual += lost * lost;
    tally.products += double{product} * product;
    tally.changed += after != convert<kWeight, kOut, Scaling::kNone>(before, 1.0f);
    return after;
  }
};

}  // namespace lora_refit
