// Device memory that another process maps through a file descriptor (virtual memory management).
#pragma once

#include <cstddef>

#include "driver/owned.h"

namespace lora_refit::driver {

// Physical memory mapped at an address of its own, readable and writable by one device.
class PhysicalMapping {
 public:
  PhysicalMapping(const Device& device, PhysicalHandle physical, size_t bytes);

  DeviceAddress address() const { return range_.get(); }

 private:
  Owned<DeviceAddress, size_t> range_;
  Owned<DeviceAddress, size_t> mapping_;  // declared last: unmapped before its range is freed
};

class SharedDeviceMemory {
 public:
  // `bytes` is rounded up to the device's granularity.
  SharedDeviceMemory(const Device& device, size_t bytes);

  DeviceAddress address() const { return mapping_.address(); }
  size_t bytes() const { return bytes_; }

  // A new descriptor that the caller closes. Whoever has it can map the memory.
  int export_fd() const;

 private:
  const Device& device_;
  size_t bytes_;
  Owned<PhysicalHandle> physical_;
  PhysicalMapping mapping_;
};

// The memory behind a descriptor that export_fd() made. `bytes` must be the exporter's bytes().
// The descriptor stays the caller's.
PhysicalMapping map_fd(const Device& device, int fd, size_t bytes);

}  // namespace lora_refit::driver
