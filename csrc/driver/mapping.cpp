#include "driver/mapping.h"

namespace lora_refit::driver {

Mapping Mapping::open_ipc(const Device& device, const IpcHandle& handle) {
  DeviceAddress address = 0;
  Context(device).call(&Api::cuIpcOpenMemHandle, &address, handle, kIpcLazyPeerAccess);
  return {address, Owned<DeviceAddress>(device, &Api::cuIpcCloseMemHandle, address)};
}

Mapping Mapping::open_fd(const Device& device, int fd, size_t bytes) {
  PhysicalMapping mapping = map_fd(device, fd, bytes);
  const DeviceAddress address = mapping.address();
  return {address, std::move(mapping)};
}

Mapping Mapping::register_host(const Device& device, void* host, size_t bytes) {
  const Context context(device);
  context.call(&Api::cuMemHostRegister, host, bytes,
               kHostRegisterPortable | kHostRegisterDeviceMap);
  Owned<void*> registration(device, &Api::cuMemHostUnregister, host);
  DeviceAddress address = 0;
  context.call(&Api::cuMemHostGetDevicePointer, &address, host, 0u);
  return {address, std::move(registration)};
}

}  // namespace lora_refit::driver
