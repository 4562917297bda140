#include "driver/results.h"

namespace lora_refit::driver {

Results::Results(const Device& device, size_t bytes)
    : device_(device), bytes_(bytes), on_device_(device, bytes), on_host_(device, bytes) {}

void Results::zero(StreamHandle stream) const { zero_async(device_, address(), bytes_, stream); }

void Results::fetch(StreamHandle stream) const {
  if (bytes_ == 0) return;
  Context(device_).call(&Api::cuMemcpyDtoHAsync, on_host_.data(), address(), bytes_, stream);
}

}  // namespace lora_refit::driver
