#include "address_space.h"

#include <sys/mman.h>

namespace fakecuda {
namespace {

const char* name_of(Kind kind) {
  switch (kind) {
    case Kind::kMemory:
      return "device memory";
    case Kind::kIpcMapping:
      return "ipc mapping";
    case Kind::kReservation:
      return "address range";
    case Kind::kMapping:
      return "mapping";
    case Kind::kPinned:
      return "pinned memory";
    case Kind::kRegistered:
      return "registration";
    case Kind::kGone:
      return "gone";
  }
  return "?";
}

bool may_use(const Device& device, Kind kind, const Range& range) {
  switch (kind) {
    case Kind::kMemory:
    case Kind::kIpcMapping:
      return range.device == device.number || device.peers.count(range.device) > 0;
    case Kind::kMapping:
      return range.readers.count(device.number) > 0;
    default:
      return false;
  }
}

}  // namespace

AddressSpace& address_space() {
  static AddressSpace& all = *new AddressSpace;
  return all;
}

void AddressSpace::add(uintptr_t address, Range range) {
  const Kind kind = range.kind;
  ranges_[kind].emplace(address, std::move(range));
}

Range& AddressSpace::at(uintptr_t address, Kind kind) {
  const auto found = ranges_[kind].find(address);
  require(found != ranges_[kind].end(), kErrorInvalidValue);
  return found->second;
}

const Range* AddressSpace::containing(uintptr_t address, Kind kind) const {
  const auto ranges = ranges_.find(kind);
  if (ranges == ranges_.end()) return nullptr;
  auto after = ranges->second.upper_bound(address);
  if (after == ranges->second.begin()) return nullptr;
  --after;
  return address - after->first < after->second.bytes ? &after->second : nullptr;
}

bool AddressSpace::overlaps(uintptr_t address, size_t bytes, Kind kind) const {
  const auto ranges = ranges_.find(kind);
  if (ranges == ranges_.end()) return false;
  if (containing(address, kind) != nullptr) return true;
  const auto after = ranges->second.lower_bound(address);
  return after != ranges->second.end() && after->first - address < bytes;
}

void AddressSpace::retire(uintptr_t address, Kind kind) {
  const size_t bytes = at(address, kind).bytes;
  mmap(reinterpret_cast<void*>(address), bytes, PROT_NONE,
       MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
  remove(address, kind);
  add(address, Range{Kind::kGone, bytes});
}

void AddressSpace::remove(uintptr_t address, Kind kind) { ranges_[kind].erase(address); }

void AddressSpace::check_access(const Device& device, uintptr_t address, size_t bytes) const {
  if (bytes == 0) return;
  const uintptr_t last = address + bytes - 1;
  for (const Kind kind : {Kind::kMemory, Kind::kIpcMapping, Kind::kMapping}) {
    const Range* range = containing(address, kind);
    if (range == nullptr) continue;
    const bool whole = containing(last, kind) == range;
    require(whole && may_use(device, kind, *range), kErrorIllegalAddress);
    return;
  }
  for (const Kind kind : {Kind::kReservation, Kind::kGone}) {
    require(!overlaps(address, bytes, kind), kErrorIllegalAddress);
  }
  require(address >= 4096, kErrorIllegalAddress);
}

std::map<std::string, size_t> AddressSpace::counts() const {
  std::map<std::string, size_t> counts;
  for (const auto& [kind, ranges] : ranges_) {
    if (kind != Kind::kGone) counts[name_of(kind)] = ranges.size();
  }
  return counts;
}

bool is_pinned(const void* address) {
  const auto start = reinterpret_cast<uintptr_t>(address);
  return address_space().containing(start, Kind::kPinned) != nullptr ||
         address_space().containing(start, Kind::kRegistered) != nullptr;
}

}  // namespace fakecuda
