// Raw device memory, pinned host memory, and blocking copies between device and host.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "driver/owned.h"

namespace lora_refit::driver {

// cuMemAlloc, whatever allocator, sleep pool or expandable segments the caller's torch uses.
class DeviceMemory {
 public:
  DeviceMemory(const Device& device, size_t bytes);

  // `bytes` is rounded up, so that an IPC handle of it shares nothing else: the driver shares whole
  // 2 MiB blocks, in which it may place small allocations together.
  static DeviceMemory shareable(const Device& device, size_t bytes);

  DeviceAddress address() const { return memory_.get(); }
  size_t bytes() const { return bytes_; }
  IpcHandle ipc_handle() const;

 private:
  const Device& device_;
  size_t bytes_;
  Owned<DeviceAddress> memory_;
};

// Page-locked host memory, zeroed: asynchronous copies from and to it do not block.
class PinnedMemory {
 public:
  PinnedMemory(const Device& device, size_t bytes);

  void* data() const { return memory_.get(); }

 private:
  Owned<void*> memory_;
};

// Both return when the bytes have arrived.
void copy_from_host(const Device& device, DeviceAddress to, const void* from, size_t bytes);
void copy_to_host(const Device& device, void* to, DeviceAddress from, size_t bytes);

// Zeroes the bytes once the stream gets there.
void zero_async(const Device& device, DeviceAddress address, size_t bytes, StreamHandle stream);

// A table that kernels read, in device memory from construction on.
template <typename Row>
DeviceMemory upload(const Device& device, const std::vector<Row>& rows) {
  DeviceMemory memory(device, rows.size() * sizeof(Row));
  copy_from_host(device, memory.address(), rows.data(), rows.size() * sizeof(Row));
  return memory;
}

}  // namespace lora_refit::driver
