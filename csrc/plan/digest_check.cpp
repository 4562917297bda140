#include "plan/digest_check.h"

#include <stdexcept>
#include <string>

namespace lora_refit {

void check_digest_buffer(size_t index, uint64_t address, uint64_t bytes) {
  const std::string name = "buffer " + std::to_string(index);
  if (bytes % 2 != 0 || bytes > INT64_MAX) {
    throw std::invalid_argument(name + ": size " + std::to_string(bytes) +
                                " bytes is not a multiple of 2");
  }
  if (bytes > 0 && address == 0) throw std::invalid_argument(name + " has address 0");
}

}  // namespace lora_refit
