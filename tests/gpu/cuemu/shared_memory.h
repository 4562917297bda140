// Shared memory that holds garbage until a kernel writes it.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <memory>

namespace cuemu {

struct FreeShared {
  void operator()(char* memory) const { std::free(memory); }
};
using DynamicShared = std::unique_ptr<char, FreeShared>;

// Exactly `bytes`, 128-byte aligned, filled with a pattern that is a NaN in fp32, fp16 and bf16.
DynamicShared allocate_dynamic_shared(size_t bytes);

// Fills the `__shared__` variables of this OS thread, which are thread_local, with the same
// pattern. Called once on a new OS thread, before anything else runs there.
void poison_static_shared();

}  // namespace cuemu
