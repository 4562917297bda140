// What the emulator reports: a kernel that no GPU could run as written.
#pragma once

#include <stdexcept>

namespace cuemu {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace cuemu
