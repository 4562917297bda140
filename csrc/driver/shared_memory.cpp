#include "driver/shared_memory.h"

namespace lora_refit::driver {
namespace {

MemoryLocation location_of(const Device& device) { return {kLocationDevice, device.number()}; }

AllocationProperties shareable(const Device& device) {
  AllocationProperties properties{};
  properties.type = kAllocationPinned;
  properties.handle_types = kHandlePosixFd;
  properties.location = location_of(device);
  return properties;
}

size_t round_up(const Device& device, size_t bytes) {
  const AllocationProperties properties = shareable(device);
  size_t granularity = 0;
  Context(device).call(&Api::cuMemGetAllocationGranularity, &granularity, &properties,
                       kGranularityMinimum);
  const size_t pages = bytes == 0 ? 1 : (bytes - 1) / granularity + 1;
  return pages * granularity;
}

Owned<PhysicalHandle> create(const Device& device, size_t bytes) {
  const AllocationProperties properties = shareable(device);
  PhysicalHandle handle = 0;
  Context(device).call(&Api::cuMemCreate, &handle, bytes, &properties, 0ull);
  return {device, &Api::cuMemRelease, handle};
}

Owned<PhysicalHandle> import(const Device& device, int fd) {
  PhysicalHandle handle = 0;
  void* os_handle = reinterpret_cast<void*>(static_cast<intptr_t>(fd));
  Context(device).call(&Api::cuMemImportFromShareableHandle, &handle, os_handle, kHandlePosixFd);
  return {device, &Api::cuMemRelease, handle};
}

Owned<DeviceAddress, size_t> reserve(const Device& device, size_t bytes) {
  DeviceAddress address = 0;
  Context(device).call(&Api::cuMemAddressReserve, &address, bytes, size_t{0}, DeviceAddress{0},
                       0ull);
  return {device, &Api::cuMemAddressFree, address, bytes};
}

Owned<DeviceAddress, size_t> map(const Device& device, DeviceAddress address, size_t bytes,
                                 PhysicalHandle physical) {
  const Context context(device);
  context.call(&Api::cuMemMap, address, bytes, size_t{0}, physical, 0ull);
  Owned<DeviceAddress, size_t> mapping(device, &Api::cuMemUnmap, address, bytes);
  const AccessDescription access{location_of(device), kAccessReadWrite};
  context.call(&Api::cuMemSetAccess, address, bytes, &access, size_t{1});
  return mapping;
}

}  // namespace

PhysicalMapping::PhysicalMapping(const Device& device, PhysicalHandle physical, size_t bytes)
    : range_(reserve(device, bytes)), mapping_(map(device, range_.get(), bytes, physical)) {}

SharedDeviceMemory::SharedDeviceMemory(const Device& device, size_t bytes)
    : device_(device),
      bytes_(round_up(device, bytes)),
      physical_(create(device, bytes_)),
      mapping_(device, physical_.get(), bytes_) {}

int SharedDeviceMemory::export_fd() const {
  int fd = -1;
  Context(device_).call(&Api::cuMemExportToShareableHandle, static_cast<void*>(&fd),
                        physical_.get(), kHandlePosixFd, 0ull);
  return fd;
}

PhysicalMapping map_fd(const Device& device, int fd, size_t bytes) {
  // A mapping keeps its physical memory alive; the handle is needed only to make it.
  const Owned<PhysicalHandle> physical = import(device, fd);
  return PhysicalMapping(device, physical.get(), bytes);
}

}  // namespace lora_refit::driver
