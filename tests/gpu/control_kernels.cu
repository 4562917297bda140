// Small kernels that are right or wrong in one known way: the simulator's own test. Each gets 64
// words of global memory, and runs as two blocks of 64 threads.
#include <cstdint>

#include "cuda_runtime.h"

#define CONTROL(name) extern "C" __global__ void name(int* g)

namespace {

__device__ int thread() { return static_cast<int>(threadIdx.x); }

// Keeps a value alive without a store that would race.
__device__ void use(int* g, int value) {
  if (value == 12345) atomicAdd(g, value);
}

__device__ void copy_async(void* shared, const void* global) {
  const auto to = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(global) : "memory");
  asm volatile("cp.async.commit_group;" ::: "memory");
}

__device__ void wait_for_copies() { asm volatile("cp.async.wait_group 0;" ::: "memory"); }

}  // namespace

CONTROL(blocks_store_equal_values) { g[thread()] = thread(); }
CONTROL(blocks_store_different_values) { g[thread()] = static_cast<int>(blockIdx.x); }
CONTROL(everyone_adds_atomically) { atomicAdd(&g[0], 1); }
CONTROL(store_beside_an_atomic) {
  if (thread() == 40) g[0] = 7;
  atomicAdd(&g[0], 1);
}
CONTROL(load_of_another_blocks_store) {
  if (blockIdx.x == 0) g[thread()] = 1;
  __syncthreads();  // does not order blocks
  if (blockIdx.x == 1) use(g, *const_cast<volatile int*>(&g[thread()]));
}
CONTROL(read_only_load_after_a_store) {
  if (blockIdx.x == 0) {
    g[thread()] = 1;
    int value;
    asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(value) : "l"(&g[thread()]));
    use(g, value);
  }
}

CONTROL(neighbour_lane_without_warp_barrier) {
  volatile __shared__ int s[64];
  s[thread()] = thread();
  use(g, s[thread() ^ 1]);
}
CONTROL(neighbour_lane_behind_warp_barrier) {
  volatile __shared__ int s[64];
  s[thread()] = thread();
  __syncwarp();
  use(g, s[thread() ^ 1]);
}
CONTROL(other_warp_behind_warp_barrier) {
  volatile __shared__ int s[64];
  s[thread()] = thread();
  __syncwarp();
  use(g, s[thread() ^ 32]);
}
CONTROL(other_warp_behind_barrier) {
  volatile __shared__ int s[64];
  s[thread()] = thread();
  __syncthreads();
  use(g, s[thread() ^ 32]);
}
CONTROL(two_warps_write_one_word) {
  volatile __shared__ int s[64];
  s[thread() % 32] = 5;
}
CONTROL(overwritten_while_others_read) {
  volatile __shared__ int s[64];
  s[thread()] = thread();
  __syncthreads();
  use(g, s[0]);
  if (thread() == 63) s[0] = 1;
}
CONTROL(overwritten_after_others_read) {
  volatile __shared__ int s[64];
  s[thread()] = thread();
  __syncthreads();
  use(g, s[0]);
  __syncthreads();
  if (thread() == 63) s[0] = 1;
}
CONTROL(shared_atomics) {
  __shared__ int s;
  if (thread() == 0) s = 0;
  __syncthreads();
  atomicAdd(&s, 1);
  __syncthreads();
  if (thread() == 0) atomicAdd(g, s);
}
CONTROL(shared_atomics_without_barrier) {
  __shared__ int s;
  if (thread() == 0) s = 0;
  __syncthreads();
  atomicAdd(&s, 1);
  if (thread() == 0) atomicAdd(g, *const_cast<volatile int*>(&s));
}

CONTROL(barrier_after_exit) {
  if (thread() < 32) return;
  __syncthreads();
  use(g, thread());
}
CONTROL(barrier_in_a_branch) {
  if (thread() < 32) {
    __syncthreads();
    use(g, 1);
  }
}
CONTROL(shuffle_with_absent_lanes) {
  if (thread() < 16) use(g, __shfl_xor_sync(~0u, thread(), 1));
}
CONTROL(shuffle_of_half_a_warp) {
  if (thread() < 16) use(g, __shfl_xor_sync(0xFFFFu, thread(), 1));
}
CONTROL(shuffle_not_named_in_the_mask) { use(g, __shfl_xor_sync(0xFFFFu, thread(), 1)); }
CONTROL(shuffle_after_loops_of_different_length) {
  int sum = 0;
  for (int i = thread() % 32; i < 40; i += 32) sum += *const_cast<volatile int*>(&g[i]);
  for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
  use(g, sum);
}

CONTROL(store_out_of_bounds) { g[thread() + 1] = thread() + 1; }
CONTROL(load_before_the_start) { use(g, *const_cast<volatile int*>(&g[thread() - 1])); }
CONTROL(misaligned_store) { *reinterpret_cast<int*>(reinterpret_cast<char*>(g) + 2) = 0; }
CONTROL(shared_out_of_bounds) {
  volatile __shared__ int s[64];
  s[thread() + 4 * (g[0] + 1)] = 1;
}

CONTROL(async_copy_waited_for) {
  __shared__ int s[64];
  copy_async(&s[thread()], &g[thread()]);
  wait_for_copies();
  use(g, *const_cast<volatile int*>(&s[thread()]));
}
CONTROL(async_copy_not_waited_for) {
  __shared__ int s[64];
  copy_async(&s[thread()], &g[thread()]);
  use(g, *const_cast<volatile int*>(&s[thread()]));
}
CONTROL(async_copy_of_another_warp_without_barrier) {
  __shared__ int s[64];
  copy_async(&s[thread()], &g[thread()]);
  wait_for_copies();
  use(g, *const_cast<volatile int*>(&s[thread() ^ 32]));
}
CONTROL(async_copy_of_another_warp_behind_barrier) {
  __shared__ int s[64];
  copy_async(&s[thread()], &g[thread()]);
  wait_for_copies();
  __syncthreads();
  use(g, *const_cast<volatile int*>(&s[thread() ^ 32]));
}
