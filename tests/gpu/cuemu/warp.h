// Collectives of the lanes of one warp.
#pragma once

#include <array>
#include <cstdint>

#include "cuemu/sanitizers.h"

namespace cuemu {

inline constexpr unsigned kWarpLanes = 32;
inline constexpr uint32_t kAllLanes = 0xFFFFFFFFu;
inline constexpr int kPayloadBytes = 64;

// What each lane of the mask brought to a collective; null for other lanes.
using Payloads = std::array<const void*, kWarpLanes>;

// One thread's side of the collective it waits in. No std::string: ThreadSanitizer would see its
// memcpy.
struct WarpMeeting {
  const char* operation = "";
  uint32_t mask = 0;
  unsigned turn = 0;  // how many it has joined
  // Of even and odd turns: a lane may be one collective ahead of the last reader of the other.
  alignas(16) char payload[2][kPayloadBytes];
  std::array<Token, 2> tokens;
  Payloads payloads{};
  std::array<Token*, kWarpLanes> others{};
};

// Waits until all lanes in `mask` have called it with the same operation and mask. The result stays
// valid until the caller's next collective. Throws Error where a GPU's behaviour would be
// undefined.
const Payloads& exchange(const char* operation, uint32_t mask, const void* payload, int bytes);

// exchange() as __syncwarp: orders the memory accesses of the lanes, which others do not.
void synchronise_warp(uint32_t mask);

unsigned lane_number();

template <class T>
T payload_of(const Payloads& payloads, unsigned lane) {
  T value;
  __builtin_memcpy(&value, payloads[lane], sizeof value);
  return value;
}

}  // namespace cuemu
