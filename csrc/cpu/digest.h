// Digests of contiguous buffers.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lora_refit {

// Writes the digest of each buffer to `out`. Sizes must be even; a last odd half word counts as the
// low half of a word. `threads` 0 means the default. Throws std::invalid_argument.
void digest_buffers(const uint64_t* addresses, const uint64_t* sizes_bytes, size_t count,
                    uint64_t* out, int threads);

}  // namespace lora_refit
