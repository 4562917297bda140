// Executes one piece of a copy program.
#pragma once

#include <cstddef>

#include "cpu/tiles.h"

namespace lora_refit {

// `src` and `dst` are the bases of the piece's buffers (`src` is unused by a zero fill). Adds to
// `sum` what it wrote.
void run_piece(const Piece& piece, const std::byte* src, std::byte* dst, DigestSum& sum);

}  // namespace lora_refit
