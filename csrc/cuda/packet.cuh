// A few neighbouring bytes of a buffer, on their way through one lane's registers.
#pragma once

#include <cstdint>

#include "convert.h"
#include "cuda/ptx.cuh"

namespace lora_refit::cuda {

// 2, 4, 8, 16 or 32 bytes. Two bytes lie in the low half of their word.
template <int kBytes>
struct Packet {
  uint32_t words[(kBytes + 3) / 4];
};

// The widest single access inside a packet: what its address must be aligned to.
template <int kBytes>
inline constexpr int kPacketAlignment = kBytes < 16 ? kBytes : 16;

template <int kBytes>
__device__ __forceinline__ Packet<kBytes> load_packet(const std::byte* address) {
  Packet<kBytes> packet;
  if constexpr (kBytes == 2) {
    packet.words[0] = ptx::load_2(address);
  } else if constexpr (kBytes == 4) {
    packet.words[0] = ptx::load_4(address);
  } else if constexpr (kBytes == 8) {
    const uint2 v = ptx::load_streaming_8(address);
    packet = {v.x, v.y};
  } else {
    static_assert(kBytes % 16 == 0);
#pragma unroll
    for (int i = 0; i < kBytes / 16; ++i) {
      const uint4 v = ptx::load_streaming_16(address + 16 * i);
      packet.words[4 * i] = v.x;
      packet.words[4 * i + 1] = v.y;
      packet.words[4 * i + 2] = v.z;
      packet.words[4 * i + 3] = v.w;
    }
  }
  return packet;
}

template <int kBytes>
__device__ __forceinline__ void store_packet(std::byte* address, const Packet<kBytes>& packet) {
  const uint32_t* words = packet.words;
  if constexpr (kBytes == 2) {
    ptx::store_2(address, static_cast<uint16_t>(words[0]));
  } else if constexpr (kBytes == 4) {
    ptx::store_4(address, words[0]);
  } else if constexpr (kBytes == 8) {
    ptx::store_streaming_8(address, uint2{words[0], words[1]});
  } else {
    static_assert(kBytes == 16);
    ptx::store_streaming_16(address, uint4{words[0], words[1], words[2], words[3]});
  }
}

// Element `index` of a packet of elements; the index is known at compile time once loops unroll.
template <DType kDType, int kBytes>
__device__ __forceinline__ typename Element<kDType>::Bits get_element(const Packet<kBytes>& packet,
                                                                      int index) {
  if constexpr (element_bytes(kDType) == 4) {
    return packet.words[index];
  } else {
    return static_cast<uint16_t>(packet.words[index / 2] >> (index % 2 * 16));
  }
}

// Sets element `index` of a packet whose bits there are still zero.
template <DType kDType, int kBytes>
__device__ __forceinline__ void set_element(Packet<kBytes>& packet, int index, uint32_t bits) {
  if constexpr (element_bytes(kDType) == 4) {
    packet.words[index] = bits;
  } else {
    packet.words[index / 2] |= bits << (index % 2 * 16);
  }
}

}  // namespace lora_refit::cuda
