// The base addresses of a program's buffers, on the device.
#pragma once

#include <cstddef>
#include <cstdint>

#include "driver/memory.h"

namespace lora_refit::driver {

// One address per source and per destination buffer, in host memory.
struct Addresses {
  const uint64_t* sources;
  const uint64_t* destinations;
};

// Stays at one place, so that captured launches find new addresses there.
class AddressTable {
 public:
  AddressTable(const Device& device, size_t source_count, size_t destination_count);

  const uint64_t* sources() const;
  const uint64_t* destinations() const { return sources() + source_count_; }

  bool holds(const Addresses& addresses) const;

  // The previous upload must have been carried out.
  void upload(const Addresses& addresses, StreamHandle stream);

  // Makes the next upload necessary.
  void forget() { uploaded_ = false; }

 private:
  size_t count() const { return source_count_ + destination_count_; }

  const Device& device_;
  size_t source_count_;
  size_t destination_count_;
  bool uploaded_ = false;
  PinnedMemory staging_;
  DeviceMemory table_;
};

}  // namespace lora_refit::driver
