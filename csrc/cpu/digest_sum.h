// Accumulates the digest of one destination buffer.
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

// Runs of one chunk mostly come one after the other, so the chunk weight is applied when the
// chunk changes.
class DigestSum {
 public:
  void add(uint64_t chunk, uint64_t weighted_words) {
    if (chunk != chunk_) {
      folded_ += pending_ * chunk_weight(chunk_);
      pending_ = 0;
      chunk_ = chunk;
    }
    pending_ += weighted_words;
  }

  uint64_t value() const { return folded_ + pending_ * chunk_weight(chunk_); }

 private:
  uint64_t folded_ = 0;
  uint64_t pending_ = 0;
  uint64_t chunk_ = 0;
};

}  // namespace lora_refit
