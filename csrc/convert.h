// Scalar casts between fp32, fp16 and bf16: round to nearest even, subnormals kept.
// A NaN stays a NaN: made quiet, with its sign and the payload bits that fit, as F16C does.
#pragma once

#include <cstdint>
#include <cstring>

#include "block.h"

namespace lora_refit {

LORA_REFIT_HOST_DEVICE inline float float_from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

LORA_REFIT_HOST_DEVICE inline uint32_t bits_of_float(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

LORA_REFIT_HOST_DEVICE inline float f16_to_float(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t magnitude = half & 0x7FFFu;
  if (magnitude < 0x0400u) {  // zero or subnormal: an integer multiple of 2^-24
    const float value = static_cast<float>(magnitude) * 0x1p-24f;
    return float_from_bits(sign | bits_of_float(value));
  }
  if (magnitude >= 0x7C00u) {
    const uint32_t quiet = magnitude > 0x7C00u ? 0x00400000u : 0u;
    return float_from_bits(sign | 0x7F800000u | quiet | ((magnitude & 0x03FFu) << 13));
  }
  return float_from_bits(sign | ((magnitude << 13) + ((127u - 15u) << 23)));
}

LORA_REFIT_HOST_DEVICE inline uint16_t float_to_f16(float value) {
  const uint32_t bits = bits_of_float(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) {
    return static_cast<uint16_t>(sign | 0x7E00u | ((magnitude >> 13) & 0x03FFu));
  }
  if (magnitude >= 0x477FF000u) {  // 65520 and more round to infinity
    return static_cast<uint16_t>(sign | 0x7C00u);
  }
  if (magnitude < 0x38800000u) {  // below 2^-14: adding 0.5 aligns the units of 2^-24 at bit 0
    const float shifted = float_from_bits(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (bits_of_float(shifted) - 0x3F000000u));
  }
  const uint32_t odd = (magnitude >> 13) & 1u;
  const uint32_t rounded = magnitude - ((127u - 15u) << 23) + 0x0FFFu + odd;
  return static_cast<uint16_t>(sign | (rounded >> 13));
}

LORA_REFIT_HOST_DEVICE inline float bf16_to_float(uint16_t value) {
  return float_from_bits(static_cast<uint32_t>(value) << 16);
}

LORA_REFIT_HOST_DEVICE inline uint16_t float_to_bf16(float value) {
  const uint32_t bits = bits_of_float(value);
  const bool is_nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
  const uint32_t rounded = bits + 0x7FFFu + ((bits >> 16) & 1u);
  return static_cast<uint16_t>(is_nan ? (bits >> 16) | 0x0040u : rounded >> 16);
}

template <DType>
struct Element;

template <>
struct Element<DType::kF32> {
  using Bits = uint32_t;
  LORA_REFIT_HOST_DEVICE static float to_float(Bits bits) { return float_from_bits(bits); }
  LORA_REFIT_HOST_DEVICE static Bits from_float(float value) { return bits_of_float(value); }
};

template <>
struct Element<DType::kF16> {
  using Bits = uint16_t;
  LORA_REFIT_HOST_DEVICE static float to_float(Bits bits) { return f16_to_float(bits); }
  LORA_REFIT_HOST_DEVICE static Bits from_float(float value) { return float_to_f16(value); }
};

template <>
struct Element<DType::kBF16> {
  using Bits = uint16_t;
  LORA_REFIT_HOST_DEVICE static float to_float(Bits bits) { return bf16_to_float(bits); }
  LORA_REFIT_HOST_DEVICE static Bits from_float(float value) { return float_to_bf16(value); }
};

// What a block does to each value besides moving it.
enum class Scaling {
  kNone,       // cast only; the same dtype on both sides is a raw bit copy
  kAfterCast,  // round, multiply, round again
  kBeforeCast  // multiply in fp32, round once
};
inline constexpr int kScalingCount = 3;

// `value * scale` with the NaNs of x86: a NaN operand goes through, made quiet, and infinity times
// zero is the negative quiet NaN. `scale` must be finite.
LORA_REFIT_HOST_DEVICE inline float multiply(float value, float scale) {
  const float product = value * scale;
  if (product == product) return product;
  return float_from_bits(value == value ? 0xFFC00000u : bits_of_float(value) | 0x00400000u);
}

template <DType kSrc, DType kDst, Scaling kScaling>
LORA_REFIT_HOST_DEVICE typename Element<kDst>::Bits convert(typename Element<kSrc>::Bits bits,
                                                            float scale) {
  using To = Element<kDst>;
  if constexpr (kScaling == Scaling::kNone && kSrc == kDst) {
    return bits;
  } else {
    const float value = Element<kSrc>::to_float(bits);
    if constexpr (kScaling == Scaling::kNone) {
      return To::from_float(value);
    } else if constexpr (kScaling == Scaling::kBeforeCast || kSrc == kDst) {
      return To::from_float(multiply(value, scale));  // of one dtype, no rounding comes before
    } else {
      return To::from_float(multiply(To::to_float(To::from_float(value)), scale));
    }
  }
}

}  // namespace lora_refit
