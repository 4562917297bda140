// Which buffers of one side a program touches, and whether the addresses it is given can serve.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "plan/block_check.h"

namespace lora_refit {

class UsedBuffers {
 public:
  // `side` is what errors call these buffers: "source" or "destination".
  UsedBuffers(std::string side, const std::vector<BufferShape>& shapes);

  void use(int32_t index) { used_[index] = true; }
  size_t count() const { return used_.size(); }

  // Throws std::invalid_argument where a used buffer has address 0.
  void check_present(const uint64_t* addresses) const;

  // Also where it does not start at a multiple of its element's size, which a GPU cannot access.
  void check_aligned(const uint64_t* addresses) const;

 private:
  std::string side_;
  std::vector<bool> used_;
  std::vector<int64_t> element_bytes_;
};

}  // namespace lora_refit
