// Runs a kernel: one OS thread for each block, one fiber for each CUDA thread.
//
// `__shared__` variables are thread_local, so each block has its own. Blocks run one after another
// in an order that the seed decides, but nothing orders their memory accesses to each other, so
// ThreadSanitizer sees blocks of one wave as concurrent, as it does threads.
#pragma once

#include <cstdint>
#include <functional>

#include "cuemu/block.h"

namespace cuemu {

struct Launch {
  Coordinates grid;
  Coordinates block;
  size_t dynamic_shared_bytes = 0;
  uint64_t seed = 0;   // 0: blocks and threads in order; otherwise a random schedule
  unsigned wave = 16;  // blocks, and so OS threads, that exist at once
};

// Calls `kernel` once for each CUDA thread. Returns when all have returned. Throws Error on a
// misuse of barriers, collectives or addresses, and whatever the kernel throws. Nothing of a launch
// outlives it.
void launch(const Launch& launch, const std::function<void()>& kernel);

}  // namespace cuemu
