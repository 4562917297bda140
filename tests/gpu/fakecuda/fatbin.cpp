#include "fatbin.h"

#include <cstdint>
#include <cstring>

#include "state.h"

namespace fakecuda {
namespace {

struct Header {
  uint32_t magic;
  uint16_t version;
  uint16_t bytes;
  uint64_t payload_bytes;
};
constexpr uint32_t kMagic = 0xBA55ED50u;

// The head of each image inside. Found by comparing what nvcc writes with what cuobjdump shows.
struct Entry {
  uint16_t kind;
  uint16_t version;
  uint32_t header_bytes;
  uint64_t payload_bytes;
  uint32_t unused[3];
  uint32_t sm;
};
constexpr uint16_t kPtx = 1;
constexpr uint16_t kElf = 2;

bool runs_on(const Entry& entry, int sm) {
  const int built_for = static_cast<int>(entry.sm);
  const bool same_major = built_for / 10 == sm / 10;
  return built_for <= sm && (entry.kind == kPtx || (entry.kind == kElf && same_major));
}

}  // namespace

void require_runnable(const void* image, int sm) {
  const char* at = static_cast<const char*>(image);
  Header header;
  std::memcpy(&header, at, sizeof header);
  require(header.magic == kMagic && header.version == 1 && header.bytes == sizeof header,
          kErrorInvalidImage);
  at += header.bytes;
  const char* end = at + header.payload_bytes;
  bool runnable = false;
  while (at < end) {
    Entry entry;
    require(end - at >= static_cast<ptrdiff_t>(sizeof entry), kErrorInvalidImage);
    std::memcpy(&entry, at, sizeof entry);
    const uint64_t bytes = entry.header_bytes + entry.payload_bytes;
    require(entry.header_bytes >= sizeof entry && bytes <= static_cast<uint64_t>(end - at),
            kErrorInvalidImage);
    runnable |= runs_on(entry, sm);
    at += bytes;
  }
  require(runnable, kErrorNoBinaryForGpu);
}

}  // namespace fakecuda
