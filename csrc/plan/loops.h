// Rewrites one block into an equal one whose inner loop is as long and contiguous as possible.
#pragma once

#include "block.h"

namespace lora_refit {

bool is_empty(const CopyBlock& block);

// Same elements, same values, another loop order: destination strides become positive and ordered
// with the smallest innermost, loops of size one vanish, and loops that continue each other on
// both sides become one. Unused outer loops have size 1 and stride 0. `block` must not be empty.
CopyBlock normalise(const CopyBlock& block);

}  // namespace lora_refit
