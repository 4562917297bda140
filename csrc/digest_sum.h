// Accumulates the digest of one destination buffer.
#pragma once

#include <cstdint>

#include "block.h"

namespace lora_refit {

// Runs of one chunk mostly come one after the other, so the chunk weight is applied when the
// chunk changes.
class DigestSum {
 public:
  LORA_REFIT_HOST_DEVICE void add(uint64_t chunk, uint64_t weighted_words) {
    if (chunk != chunk_) {
      folded_ += pending_ * chunk_weight(chunk_);
      pending_ = 0;
      chunk_ = chunk;
    }
    pending_ += weighted_words;
  }

  LORA_REFIT_HOST_DEVICE uint64_t value() const {
    return folded_ + pending_ * chunk_weight(chunk_);
  }

 private:
  uint64_t folded_ = 0;
  uint64_t pending_ = 0;
  uint64_t chunk_ = 0;
};

}  // namespace lora_refit
