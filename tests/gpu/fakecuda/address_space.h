// Which addresses exist, what they are, and which devices may use them.
#pragma once

#include <cstddef>
#include <map>
#include <set>
#include <string>

#include "state.h"

namespace fakecuda {

enum class Kind { kMemory, kIpcMapping, kReservation, kMapping, kPinned, kRegistered, kGone };

struct Range {
  Kind kind;
  size_t bytes;
  int device = -1;             // where the memory lies; -1 is the host
  std::set<int> readers = {};  // VMM: devices that were given access
  bool device_map = true;      // host memory: has a device address
  int fd = -1;                 // of the pages of device memory
  std::string name = {};       // of these pages
};

class AddressSpace {
 public:
  void add(uintptr_t address, Range range);

  // The range that starts there, of that kind. Throws Refusal(kErrorInvalidValue).
  Range& at(uintptr_t address, Kind kind);
  const Range* containing(uintptr_t address, Kind kind) const;
  bool overlaps(uintptr_t address, size_t bytes, Kind kind) const;

  // Forgets the range. Its addresses are never given out again: `kGone` says whose they were.
  void retire(uintptr_t address, Kind kind);
  void remove(uintptr_t address, Kind kind);

  // Throws Refusal(kErrorIllegalAddress) where a kernel of the device cannot use these bytes.
  void check_access(const Device& device, uintptr_t address, size_t bytes) const;

  // How many ranges of each kind are live.
  std::map<std::string, size_t> counts() const;

 private:
  using Ranges = std::map<uintptr_t, Range>;
  std::map<Kind, Ranges> ranges_;
};

AddressSpace& address_space();

// Whether this host memory was page-locked through the driver.
bool is_pinned(const void* address);

}  // namespace fakecuda
