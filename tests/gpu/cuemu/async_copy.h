// cp.async as late as the PTX ISA allows: nothing moves before the thread waits for it.
#pragma once

#include <vector>

namespace cuemu {

struct AsyncCopy {
  void* shared;
  const void* global;
  int bytes;
};

using AsyncCopies = std::vector<AsyncCopy>;

// Starts a copy of the running thread.
void start_copy(const AsyncCopy& copy);

// All copies that the running thread has started and not waited for. The caller performs them: its
// code is seen by the sanitizers.
AsyncCopies take_copies();

}  // namespace cuemu
