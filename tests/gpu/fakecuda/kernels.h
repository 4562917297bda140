// The product's kernels, built by g++ against the emulator, as the stand-in launches them.
#pragma once

#include <cstddef>
#include <functional>
#include <string>

#include "state.h"

namespace fakecuda {

// Tells of memory that a launch will use.
using Touch = std::function<void(uint64_t address, int64_t bytes)>;

struct Kernel {
  std::string name;
  size_t argument_bytes;
  // One thread's work. `arguments` is the kernel's one parameter.
  void (*run)(const void* arguments);
  // Names all memory behind the arguments, tables before what they point to.
  void (*visit)(const void* arguments, const Touch& touch);
};

// Null where there is none of that name.
const Kernel* find_kernel(const std::string& name);

}  // namespace fakecuda
