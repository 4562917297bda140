// What a kernel adds to on the device, and its copy on the host.
#pragma once

#include <cstddef>

#include "driver/memory.h"

namespace lora_refit::driver {

class Results {
 public:
  Results(const Device& device, size_t bytes);

  DeviceAddress address() const { return on_device_.address(); }
  const void* on_host() const { return on_host_.data(); }

  void zero(StreamHandle stream) const;
  void fetch(StreamHandle stream) const;

 private:
  const Device& device_;
  size_t bytes_;
  DeviceMemory on_device_;
  PinnedMemory on_host_;
};

}  // namespace lora_refit::driver
