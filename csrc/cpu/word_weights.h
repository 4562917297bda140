// The word weights of the digest as a table, for the CPU's vector loads.
#pragma once

#include <array>
#include <cstdint>

#include "block.h"

namespace lora_refit {

// Zeros follow the weights so that a vector load near the end of a chunk stays inside the table.
inline constexpr int64_t kWeightPadding = 16;

constexpr std::array<uint32_t, kChunkWords + kWeightPadding> make_word_weights() {
  std::array<uint32_t, kChunkWords + kWeightPadding> weights{};
  for (int64_t i = 0; i < kChunkWords; ++i) weights[i] = word_weight(i);
  return weights;
}

alignas(64) inline constexpr auto kWordWeights = make_word_weights();

}  // namespace lora_refit
