// The compiled kernels, loaded on each device at first use.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "driver/context.h"

namespace lora_refit::driver {

// `image` is a fatbin as nvcc writes it. Throws std::invalid_argument where it is cut short or is
// something else, and where kernels of another image were loaded already.
void set_image(std::string image);

// One kernel on one device. Kernels live as long as the process.
class Kernel {
 public:
  // `dynamic_shared` is in bytes, `threads` per block.
  Kernel(const Device& device, const char* name, int threads, size_t dynamic_shared);

  // Blocks that a persistent grid needs for `work` pieces, `per_block` of which one block does at a
  // time: as many as the device holds at once, and no more than the work.
  unsigned grid(int64_t work, int64_t per_block) const;

  // Blocks that the device holds at once.
  int64_t resident_blocks() const { return resident_blocks_; }

  // `arguments` is the kernel's one parameter.
  void launch(unsigned blocks, const void* arguments, StreamHandle stream) const;

 private:
  const Device& device_;
  FunctionHandle function_ = nullptr;
  int threads_;
  size_t dynamic_shared_;
  int64_t resident_blocks_ = 0;
};

}  // namespace lora_refit::driver
