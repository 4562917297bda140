#include "driver/memory.h"

#include <algorithm>
#include <cstring>

namespace lora_refit::driver {
namespace {

// The driver refuses to allocate nothing; an empty table still has an address.
size_t at_least_one(size_t bytes) { return std::max<size_t>(bytes, 1); }

Owned<DeviceAddress> allocate(const Device& device, size_t bytes) {
  DeviceAddress address = 0;
  Context(device).call(&Api::cuMemAlloc, &address, at_least_one(bytes));
  return {device, &Api::cuMemFree, address};
}

Owned<void*> allocate_pinned(const Device& device, size_t bytes) {
  void* data = nullptr;
  Context(device).call(&Api::cuMemHostAlloc, &data, at_least_one(bytes), kHostAllocPortable);
  return {device, &Api::cuMemFreeHost, data};
}

}  // namespace

DeviceMemory::DeviceMemory(const Device& device, size_t bytes)
    : device_(device), bytes_(bytes), memory_(allocate(device, bytes)) {}

DeviceMemory DeviceMemory::shareable(const Device& device, size_t bytes) {
  constexpr size_t kBlock = size_t{2} << 20;
  if (bytes > SIZE_MAX - kBlock) return DeviceMemory(device, bytes);  // the driver refuses it
  return DeviceMemory(device, (at_least_one(bytes) + kBlock - 1) / kBlock * kBlock);
}

IpcHandle DeviceMemory::ipc_handle() const {
  IpcHandle handle;
  Context(device_).call(&Api::cuIpcGetMemHandle, &handle, address());
  return handle;
}

PinnedMemory::PinnedMemory(const Device& device, size_t bytes)
    : memory_(allocate_pinned(device, bytes)) {
  std::memset(data(), 0, bytes);
}

void copy_from_host(const Device& device, DeviceAddress to, const void* from, size_t bytes) {
  if (bytes == 0) return;
  const Context context(device);
  context.call(&Api::cuMemcpyHtoD, to, from, bytes);
  // From pageable memory the copy returns once the bytes are staged, and streams that do not block
  // with the default stream could still read what was there before.
  context.call(&Api::cuStreamSynchronize, StreamHandle{});
}

void copy_to_host(const Device& device, void* to, DeviceAddress from, size_t bytes) {
  if (bytes == 0) return;
  Context(device).call(&Api::cuMemcpyDtoH, to, from, bytes);
}

void zero_async(const Device& device, DeviceAddress address, size_t bytes, StreamHandle stream) {
  if (bytes == 0) return;
  Context(device).call(&Api::cuMemsetD8Async, address, static_cast<unsigned char>(0), bytes,
                       stream);
}

}  // namespace lora_refit::driver
