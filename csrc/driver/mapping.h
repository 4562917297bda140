// Memory that somebody else owns, made usable on one device.
#pragma once

#include <cstddef>
#include <variant>

#include "driver/owned.h"
#include "driver/shared_memory.h"

namespace lora_refit::driver {

class Mapping {
 public:
  // Memory behind DeviceMemory::ipc_handle() of another process. Peer access between the two GPUs
  // is enabled where needed.
  static Mapping open_ipc(const Device& device, const IpcHandle& handle);

  // Memory behind SharedDeviceMemory::export_fd(); `bytes` is the exporter's bytes().
  static Mapping open_fd(const Device& device, int fd, size_t bytes);

  // Host memory, page-locked and mapped for all devices. It must outlive the mapping.
  static Mapping register_host(const Device& device, void* address, size_t bytes);

  DeviceAddress address() const { return address_; }

 private:
  using Owner = std::variant<Owned<DeviceAddress>, Owned<void*>, PhysicalMapping>;
  Mapping(DeviceAddress address, Owner owner) : address_(address), owner_(std::move(owner)) {}

  DeviceAddress address_;
  Owner owner_;
};

}  // namespace lora_refit::driver
