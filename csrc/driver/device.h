// GPUs of this process: what they are, and their primary contexts.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "driver/api.h"

namespace lora_refit::driver {

class Device {
 public:
  // Throws std::invalid_argument where there is no such device. Devices live as long as the
  // process.
  static const Device& at(int ordinal);
  static const std::vector<const Device*>& all();

  int ordinal() const { return ordinal_; }
  const std::string& uuid() const { return uuid_; }  // "GPU-xxxxxxxx-xxxx-...", as nvidia-smi shows
  const std::string& name() const { return name_; }
  int major() const { return major_; }
  int minor() const { return minor_; }
  int multiprocessors() const { return multiprocessors_; }
  size_t memory_bytes() const { return memory_bytes_; }
  DeviceNumber number() const { return number_; }

  // How messages name this device.
  std::string label() const { return uuid_ + " (device " + std::to_string(ordinal_) + ")"; }

  // The context that torch uses too. Retained at first use, for the life of the process.
  ContextHandle primary_context() const;

 private:
  static std::vector<const Device*> list();
  explicit Device(int ordinal);

  int ordinal_;
  DeviceNumber number_ = 0;
  std::string uuid_;
  std::string name_;
  int major_ = 0;
  int minor_ = 0;
  int multiprocessors_ = 0;
  size_t memory_bytes_ = 0;
  mutable ContextHandle context_ = nullptr;
};

bool can_access_peer(const Device& device, const Device& other);

// Lets kernels on `device` use memory of `other`. Harmless where they already may.
void enable_peer_access(const Device& device, const Device& other);

}  // namespace lora_refit::driver
