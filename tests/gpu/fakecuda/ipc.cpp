// Legacy IPC handles: cuMemAlloc'ed memory, mapped by another process.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <string>

#include "address_space.h"
#include "pages.h"
#include "stream.h"

namespace fakecuda {
namespace {

// What a handle says. The name finds out whether the exporter still has this very allocation.
struct Exported {
  char magic[8];
  uint64_t bytes;
  int32_t process;
  int32_t fd;
  int32_t device;
  char name[36];
};
static_assert(sizeof(Exported) == sizeof(IpcHandle));
constexpr char kMagic[8] = "fakeipc";

std::string path_of(const Exported& exported) {
  return "/proc/" + std::to_string(exported.process) + "/fd/" + std::to_string(exported.fd);
}

}  // namespace
}  // namespace fakecuda

using namespace fakecuda;

FAKECUDA_ENTRY cuIpcGetMemHandle(IpcHandle* handle, DeviceAddress address) {
  return call_in_context("cuIpcGetMemHandle", [&](Device&) {
    // Memory of the VMM functions, and of other processes, has no legacy handle.
    const Range* range = address_space().containing(address, Kind::kMemory);
    require(range != nullptr, kErrorInvalidValue);
    Exported exported{};
    std::memcpy(exported.magic, kMagic, sizeof kMagic);
    exported.bytes = range->bytes;
    exported.process = getpid();
    exported.fd = range->fd;
    exported.device = range->device;
    std::strncpy(exported.name, range->name.c_str(), sizeof exported.name - 1);
    std::memcpy(handle, &exported, sizeof exported);
  });
}

FAKECUDA_ENTRY cuIpcOpenMemHandle_v2(DeviceAddress* address, IpcHandle handle, unsigned flags) {
  return call_in_context("cuIpcOpenMemHandle", [&](Device& device) {
    Exported exported;
    std::memcpy(&exported, &handle, sizeof exported);
    require(std::memcmp(exported.magic, kMagic, sizeof kMagic) == 0, kErrorInvalidValue);
    require(exported.process != getpid(), kErrorInvalidContext);
    const bool is_peer = exported.device != device.number;
    require(!is_peer || (flags == kIpcLazyPeerAccess && state().peer_access),
            kErrorPeerAccessUnsupported);
    const std::string path = path_of(exported);
    require(name_of_pages(path) == exported.name, kErrorMapFailed);
    const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
    require(fd >= 0, kErrorMapFailed);
    *address =
        reinterpret_cast<DeviceAddress>(map_pages(fd, exported.bytes, PROT_READ | PROT_WRITE));
    close(fd);
    address_space().add(*address, {Kind::kIpcMapping, exported.bytes, exported.device});
    if (is_peer) device.peers.insert(exported.device);
  });
}

FAKECUDA_ENTRY cuIpcCloseMemHandle(DeviceAddress address) {
  return call_in_context("cuIpcCloseMemHandle", [&](Device& device) {
    address_space().at(address, Kind::kIpcMapping);
    drain_all(device);
    address_space().retire(address, Kind::kIpcMapping);
  });
}
