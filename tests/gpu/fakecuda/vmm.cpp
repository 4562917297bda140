// Virtual memory management: physical memory, address ranges, mappings, access, descriptors.
#include <sys/mman.h>
#include <unistd.h>

#include <string>

#include "address_space.h"
#include "device_facts.h"
#include "pages.h"
#include "physical.h"
#include "stream.h"

namespace fakecuda {
namespace {

constexpr char kExportable[] = "fakecuda-exportable-";
constexpr char kPrivate[] = "fakecuda-private-";

void* at(DeviceAddress address) { return reinterpret_cast<void*>(address); }

void require_granular(size_t bytes) {
  require(bytes > 0 && bytes % kGranularity == 0, kErrorInvalidValue);
}

PhysicalMemory& physical_at(PhysicalHandle handle) {
  const auto found = physical_memory().find(handle);
  require(found != physical_memory().end(), kErrorInvalidValue);
  return *found->second;
}

void require_properties(const AllocationProperties& properties) {
  const int device = properties.location.id;
  require(properties.type == kAllocationPinned && properties.location.type == kLocationDevice &&
              device >= 0 && static_cast<size_t>(device) < state().devices.size(),
          kErrorInvalidValue);
}

void make_inaccessible(DeviceAddress address, size_t bytes) {
  mmap(at(address), bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1,
       0);
}

}  // namespace

PhysicalMemory::PhysicalMemory(int fd, size_t bytes, int device, bool exportable)
    : fd(fd), bytes(bytes), device(device), exportable(exportable) {}

PhysicalMemory::~PhysicalMemory() { close(fd); }

std::map<PhysicalHandle, std::unique_ptr<PhysicalMemory>>& physical_memory() {
  static auto& all = *new std::map<PhysicalHandle, std::unique_ptr<PhysicalMemory>>;
  return all;
}

}  // namespace fakecuda

using namespace fakecuda;

FAKECUDA_ENTRY cuMemGetAllocationGranularity(size_t* granularity,
                                             const AllocationProperties* properties, int option) {
  return call("cuMemGetAllocationGranularity", [&] {
    require_properties(*properties);
    require(option == kGranularityMinimum, kErrorInvalidValue);
    *granularity = kGranularity;
  });
}

FAKECUDA_ENTRY cuMemCreate(PhysicalHandle* handle, size_t bytes,
                           const AllocationProperties* properties, unsigned long long flags) {
  return call("cuMemCreate", [&] {
    require_properties(*properties);
    require_granular(bytes);
    require(flags == 0, kErrorInvalidValue);
    require(bytes <= kMemoryBytes, kErrorOutOfMemory);
    const bool exportable = properties->handle_types == kHandlePosixFd;
    const int device = properties->location.id;
    const std::string name = (exportable ? kExportable : kPrivate) + std::to_string(device);
    *handle = reinterpret_cast<PhysicalHandle>(new_handle<void*>());
    physical_memory()[*handle] =
        std::make_unique<PhysicalMemory>(new_pages(name, bytes), bytes, device, exportable);
  });
}

FAKECUDA_ENTRY cuMemRelease(PhysicalHandle handle) {
  return call("cuMemRelease",
              [&] { require(physical_memory().erase(handle) == 1, kErrorInvalidValue); });
}

FAKECUDA_ENTRY cuMemAddressReserve(DeviceAddress* address, size_t bytes, size_t alignment,
                                   DeviceAddress wanted, unsigned long long flags) {
  return call("cuMemAddressReserve", [&] {
    require_granular(bytes);
    require(alignment == 0 && wanted == 0 && flags == 0, kErrorInvalidValue);
    void* range =
        mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    require(range != MAP_FAILED, kErrorOutOfMemory);
    *address = reinterpret_cast<DeviceAddress>(range);
    address_space().add(*address, {Kind::kReservation, bytes});
  });
}

FAKECUDA_ENTRY cuMemAddressFree(DeviceAddress address, size_t bytes) {
  return call("cuMemAddressFree", [&] {
    require(address_space().at(address, Kind::kReservation).bytes == bytes, kErrorInvalidValue);
    require(!address_space().overlaps(address, bytes, Kind::kMapping), kErrorInvalidValue);
    address_space().retire(address, Kind::kReservation);
  });
}

FAKECUDA_ENTRY cuMemMap(DeviceAddress address, size_t bytes, size_t offset, PhysicalHandle handle,
                        unsigned long long flags) {
  return call("cuMemMap", [&] {
    const PhysicalMemory& physical = physical_at(handle);
    require_granular(bytes);
    require(offset == 0 && flags == 0 && bytes <= physical.bytes, kErrorInvalidValue);
    require(address_space().at(address, Kind::kReservation).bytes == bytes, kErrorInvalidValue);
    require(!address_space().overlaps(address, bytes, Kind::kMapping), kErrorInvalidValue);
    map_pages(physical.fd, bytes, PROT_NONE, at(address));
    address_space().add(address, {Kind::kMapping, bytes, physical.device});
  });
}

FAKECUDA_ENTRY cuMemUnmap(DeviceAddress address, size_t bytes) {
  return call("cuMemUnmap", [&] {
    require(address_space().at(address, Kind::kMapping).bytes == bytes, kErrorInvalidValue);
    make_inaccessible(address, bytes);
    address_space().remove(address, Kind::kMapping);
  });
}

// Without this call the pages stay inaccessible, as on a device.
FAKECUDA_ENTRY cuMemSetAccess(DeviceAddress address, size_t bytes, const AccessDescription* access,
                              size_t count) {
  return call("cuMemSetAccess", [&] {
    Range& range = address_space().at(address, Kind::kMapping);
    require(range.bytes == bytes && count == 1, kErrorInvalidValue);
    require(access->location.type == kLocationDevice && access->flags == kAccessReadWrite,
            kErrorInvalidValue);
    require(access->location.id == range.device || state().peer_access, kErrorInvalidDevice);
    range.readers.insert(access->location.id);
    mprotect(at(address), bytes, PROT_READ | PROT_WRITE);
  });
}

FAKECUDA_ENTRY cuMemExportToShareableHandle(void* fd, PhysicalHandle handle, int type,
                                            unsigned long long flags) {
  return call("cuMemExportToShareableHandle", [&] {
    const PhysicalMemory& physical = physical_at(handle);
    require(type == kHandlePosixFd && flags == 0 && physical.exportable, kErrorInvalidValue);
    *static_cast<int*>(fd) = dup(physical.fd);
  });
}

FAKECUDA_ENTRY cuMemImportFromShareableHandle(PhysicalHandle* handle, void* os_handle, int type) {
  return call("cuMemImportFromShareableHandle", [&] {
    require(type == kHandlePosixFd, kErrorInvalidValue);
    const int fd = static_cast<int>(reinterpret_cast<intptr_t>(os_handle));
    const std::string name = name_of_pages("/proc/self/fd/" + std::to_string(fd));
    const size_t prefix = sizeof kExportable - 1;
    require(name.compare(0, prefix, kExportable) == 0, kErrorInvalidValue);
    const int device = std::stoi(name.substr(prefix));
    const int own = dup(fd);
    const auto bytes = static_cast<size_t>(lseek(own, 0, SEEK_END));
    *handle = reinterpret_cast<PhysicalHandle>(new_handle<void*>());
    physical_memory()[*handle] = std::make_unique<PhysicalMemory>(own, bytes, device, true);
  });
}
