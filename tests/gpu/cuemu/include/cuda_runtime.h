// Stands in for the CUDA toolkit's header of the same name where g++ compiles a kernel: the CUDA
// C++ that the kernels use, in terms of the emulator.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuemu/block.h"
#include "cuemu/warp.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(bytes) alignas(bytes)
#define __shared__ static thread_local

struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};

#define threadIdx (cuemu::Block::running().current().index)
#define blockIdx (cuemu::Block::running().shape().block_index)
#define blockDim (cuemu::Block::running().shape().block)
#define gridDim (cuemu::Block::running().shape().grid)

using std::max;
using std::min;

inline void __syncthreads() { cuemu::Block::running().barrier(); }
inline void __syncwarp(uint32_t mask = cuemu::kAllLanes) { cuemu::synchronise_warp(mask); }

template <class T>
T __shfl_xor_sync(uint32_t mask, T value, int lane_bits) {
  const auto& payloads = cuemu::exchange("shfl.sync.bfly", mask, &value, sizeof value);
  const unsigned other = cuemu::lane_number() ^ static_cast<unsigned>(lane_bits);
  return payloads[other] == nullptr ? value : cuemu::payload_of<T>(payloads, other);
}

template <class T>
T atomicAdd(T* address, T value) {
  return __atomic_fetch_add(address, value, __ATOMIC_RELAXED);
}
