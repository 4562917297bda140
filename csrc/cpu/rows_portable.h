#pragma once

#include <cstring>

#include "cpu/row_kernels.h"

namespace lora_refit {

RowsKernel portable_rows_kernel(DType src, DType dst, Scaling scaling);

// The sum of word * word_weight over elements inside one chunk, the first at index `first`.
uint64_t weigh_words_portable(const std::byte* data, int64_t first, int64_t count);
uint64_t weigh_halves_portable(const std::byte* data, int64_t first, int64_t count);

template <class Bits>
Bits load(const std::byte* address) {
  Bits bits;
  std::memcpy(&bits, address, sizeof bits);
  return bits;
}

// One run inside one chunk; see walk_rows.
template <DType kSrcType, DType kDstType, Scaling kScaling>
struct PortableRun {
  static constexpr DType kSrc = kSrcType;
  static constexpr DType kDst = kDstType;
  using From = typename Element<kSrc>::Bits;
  using To = typename Element<kDst>::Bits;

  static uint64_t move(const std::byte* src, std::byte* dst, int64_t first, int64_t count,
                       float scale) {
    for (int64_t i = 0; i < count; ++i) {
      const From from = load<From>(src + i * sizeof(From));
      const To to = convert<kSrc, kDst, kScaling>(from, scale);
      std::memcpy(dst + i * sizeof(To), &to, sizeof to);
    }
    if constexpr (kDst == DType::kF32) return weigh_words_portable(dst, first, count);
    return weigh_halves_portable(dst, first, count);
  }
};

}  // namespace lora_refit
