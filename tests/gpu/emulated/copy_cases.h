// Random block lists for the copy kernel.
#pragma once

#include <vector>

#include "emulated/buffers.h"
#include "plan/block_check.h"

namespace lora_refit::testing {

// Buffer i of either side has dtype i, so a block chooses its dtypes by its buffers.
struct CopyCase {
  std::vector<CopyBlock> blocks;
  std::vector<BufferShape> sources;
  std::vector<BufferShape> destinations;
};

// A few blocks, none, a single element, several hundred, or one of each variant.
CopyCase random_copy_case(Random& random);

}  // namespace lora_refit::testing
