// Refuses block lists that would touch memory outside their buffers.
#pragma once

#include <cstdint>
#include <vector>

#include "block.h"

namespace lora_refit {

struct BufferShape {
  DType dtype;
  int64_t elements;
};

// Throws std::invalid_argument naming the first bad block.
void check_blocks(const std::vector<CopyBlock>& blocks, const std::vector<BufferShape>& sources,
                  const std::vector<BufferShape>& destinations);

}  // namespace lora_refit
