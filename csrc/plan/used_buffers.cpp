#include "plan/used_buffers.h"

#include <stdexcept>
#include <utility>

namespace lora_refit {

UsedBuffers::UsedBuffers(std::string side, const std::vector<BufferShape>& shapes)
    : side_(std::move(side)), used_(shapes.size()) {
  for (const BufferShape& shape : shapes) element_bytes_.push_back(element_bytes(shape.dtype));
}

void UsedBuffers::check_present(const uint64_t* addresses) const {
  for (size_t i = 0; i < used_.size(); ++i) {
    if (used_[i] && addresses[i] == 0) {
      throw std::invalid_argument(side_ + " buffer " + std::to_string(i) +
                                  " has address 0, but blocks use it");
    }
  }
}

void UsedBuffers::check_aligned(const uint64_t* addresses) const {
  check_present(addresses);
  for (size_t i = 0; i < used_.size(); ++i) {
    if (used_[i] && addresses[i] % element_bytes_[i] != 0) {
      throw std::invalid_argument(side_ + " buffer " + std::to_string(i) + " has address " +
                                  std::to_string(addresses[i]) + ", not a multiple of " +
                                  std::to_string(element_bytes_[i]) + " bytes");
    }
  }
}

}  // namespace lora_refit
