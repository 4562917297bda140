// Device memory, pinned host memory, and copies.
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <string>
#include <vector>

#include "address_space.h"
#include "device_facts.h"
#include "pages.h"
#include "stream.h"

namespace fakecuda {
namespace {

size_t whole_pages(size_t bytes) { return (bytes + 4095) / 4096 * 4096; }

void* at(DeviceAddress address) { return reinterpret_cast<void*>(address); }

// A copy or fill of device memory by the device itself.
Task checked(Device& device, DeviceAddress address, size_t bytes, Task task) {
  return [&device, address, bytes, task = std::move(task)] {
    address_space().check_access(device, address, bytes);
    task();
  };
}

// The bytes leave the host now if they are pageable, and once the stream gets there if pinned.
Task copy_to_device(Device& device, DeviceAddress to, const void* from, size_t bytes) {
  if (is_pinned(from)) {
    return checked(device, to, bytes, [=] { std::memcpy(at(to), from, bytes); });
  }
  const char* start = static_cast<const char*>(from);
  const std::vector<char> staged(start, start + bytes);
  return checked(device, to, bytes, [=] { std::memcpy(at(to), staged.data(), bytes); });
}

Task copy_to_host(Device& device, void* to, DeviceAddress from, size_t bytes) {
  return checked(device, from, bytes, [=] { std::memcpy(to, at(from), bytes); });
}

}  // namespace
}  // namespace fakecuda

using namespace fakecuda;

FAKECUDA_ENTRY cuMemAlloc_v2(DeviceAddress* address, size_t bytes) {
  return call_in_context("cuMemAlloc", [&](Device& device) {
    static int serial = 0;
    require_no_capture();
    require(bytes > 0, kErrorInvalidValue);
    require(bytes <= kMemoryBytes, kErrorOutOfMemory);
    Range range{Kind::kMemory, whole_pages(bytes), device.number};
    range.name = "fakecuda-" + std::to_string(getpid()) + "-" + std::to_string(++serial);
    range.fd = new_pages(range.name, range.bytes);
    *address =
        reinterpret_cast<DeviceAddress>(map_pages(range.fd, range.bytes, PROT_READ | PROT_WRITE));
    std::memset(at(*address), 0xA5, range.bytes);  // whatever was there before
    address_space().add(*address, std::move(range));
  });
}

FAKECUDA_ENTRY cuMemFree_v2(DeviceAddress address) {
  return call_in_context("cuMemFree", [&](Device& device) {
    require_no_capture();
    const int fd = address_space().at(address, Kind::kMemory).fd;
    drain_all(device);
    address_space().retire(address, Kind::kMemory);
    close(fd);
  });
}

FAKECUDA_ENTRY cuMemHostAlloc(void** data, size_t bytes, unsigned flags) {
  return call_in_context("cuMemHostAlloc", [&](Device&) {
    require_no_capture();
    require(bytes > 0 && flags == kHostAllocPortable, kErrorInvalidValue);
    *data = mmap(nullptr, whole_pages(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
                 -1, 0);
    require(*data != MAP_FAILED, kErrorOutOfMemory);
    std::memset(*data, 0xA5, whole_pages(bytes));
    address_space().add(reinterpret_cast<uintptr_t>(*data), {Kind::kPinned, whole_pages(bytes)});
  });
}

FAKECUDA_ENTRY cuMemFreeHost(void* data) {
  return call_in_context("cuMemFreeHost", [&](Device& device) {
    require_no_capture();
    const auto address = reinterpret_cast<uintptr_t>(data);
    address_space().at(address, Kind::kPinned);
    drain_all(device);
    address_space().retire(address, Kind::kPinned);
  });
}

FAKECUDA_ENTRY cuMemHostRegister_v2(void* data, size_t bytes, unsigned flags) {
  return call_in_context("cuMemHostRegister", [&](Device&) {
    const auto address = reinterpret_cast<uintptr_t>(data);
    require(bytes > 0 && address != 0 && flags <= 15, kErrorInvalidValue);
    require(!address_space().overlaps(address, bytes, Kind::kRegistered) &&
                !address_space().overlaps(address, bytes, Kind::kPinned),
            kErrorHostMemoryAlreadyRegistered);
    Range range{Kind::kRegistered, bytes};
    range.device_map = (flags & kHostRegisterDeviceMap) != 0;
    address_space().add(address, std::move(range));
  });
}

FAKECUDA_ENTRY cuMemHostUnregister(void* data) {
  return call_in_context("cuMemHostUnregister", [&](Device&) {
    const auto address = reinterpret_cast<uintptr_t>(data);
    address_space().at(address, Kind::kRegistered);
    address_space().remove(address, Kind::kRegistered);
  });
}

FAKECUDA_ENTRY cuMemHostGetDevicePointer_v2(DeviceAddress* address, void* data, unsigned flags) {
  return call_in_context("cuMemHostGetDevicePointer", [&](Device&) {
    require(flags == 0, kErrorInvalidValue);
    const auto start = reinterpret_cast<uintptr_t>(data);
    const Range* range = address_space().containing(start, Kind::kRegistered);
    if (range == nullptr) range = address_space().containing(start, Kind::kPinned);
    require(range != nullptr && range->device_map, kErrorInvalidValue);
    *address = start;
  });
}

// Returns once the bytes are staged, which is before they arrive.
FAKECUDA_ENTRY cuMemcpyHtoD_v2(DeviceAddress to, const void* from, size_t bytes) {
  return call_in_context("cuMemcpyHtoD", [&](Device& device) {
    require_no_capture();
    drain_default(device);
    enqueue(device, *device.default_stream, copy_to_device(device, to, from, bytes));
  });
}

FAKECUDA_ENTRY cuMemcpyDtoH_v2(void* to, DeviceAddress from, size_t bytes) {
  return call_in_context("cuMemcpyDtoH", [&](Device& device) {
    require_no_capture();
    enqueue(device, *device.default_stream, copy_to_host(device, to, from, bytes));
    drain_default(device);
  });
}

FAKECUDA_ENTRY cuMemcpyHtoDAsync_v2(DeviceAddress to, const void* from, size_t bytes,
                                    StreamHandle handle) {
  return call_in_context("cuMemcpyHtoDAsync", [&](Device& device) {
    const auto stream = stream_at(device, handle);
    enqueue(device, *stream, copy_to_device(device, to, from, bytes));
  });
}

FAKECUDA_ENTRY cuMemcpyDtoHAsync_v2(void* to, DeviceAddress from, size_t bytes,
                                    StreamHandle handle) {
  return call_in_context("cuMemcpyDtoHAsync", [&](Device& device) {
    const auto stream = stream_at(device, handle);
    enqueue(device, *stream, copy_to_host(device, to, from, bytes));
    if (!is_pinned(to) && stream->capture == nullptr) drain(*stream);
  });
}

FAKECUDA_ENTRY cuMemsetD8Async(DeviceAddress address, unsigned char value, size_t bytes,
                               StreamHandle handle) {
  return call_in_context("cuMemsetD8Async", [&](Device& device) {
    const auto stream = stream_at(device, handle);
    enqueue(device, *stream,
            checked(device, address, bytes, [=] { std::memset(at(address), value, bytes); }));
  });
}
