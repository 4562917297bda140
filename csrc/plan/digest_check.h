// Refuses buffers that have no digest.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lora_refit {

// Throws std::invalid_argument naming the buffer where its size is odd or it has no address.
void check_digest_buffer(size_t index, uint64_t address, uint64_t bytes);

}  // namespace lora_refit
