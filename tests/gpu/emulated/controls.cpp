// Small kernels that show what the emulator reports and what it accepts; test_emulator_controls.py
// knows which of them are wrong. Arguments: the name of one, and the seed of its schedule.
#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <map>
#include <numeric>
#include <string>
#include <vector>

#include "cuda/ptx.cuh"
#include "cuemu/launch.h"

namespace {

namespace ptx = lora_refit::ptx;

constexpr int kThreads = 64;

// What a kernel writes to: one word for each thread of a block.
using Words = uint32_t*;
using Kernel = void (*)(Words);

uint32_t thread() { return threadIdx.x; }
bool first_block() { return blockIdx.x == 0; }

// ---- races ----------------------------------------------------------------------------------

void two_threads_write_one_word(Words out) {
  if (first_block()) out[thread() % 32] = 1;
}

void two_blocks_write_one_word(Words out) { out[thread()] = thread(); }

void neighbour_read_without_syncwarp(Words out) {
  __shared__ uint32_t words[kThreads];
  words[thread()] = thread();
  const uint32_t other = words[thread() ^ 1];
  if (other > kThreads) out[0] = other;
}

void shuffle_is_no_fence(Words out) {
  __shared__ uint32_t words[kThreads];
  words[thread()] = thread();
  const uint32_t lane = ptx::shuffle_xor(thread(), 1);
  if (words[lane] > kThreads) out[0] = lane;
}

void syncwarp_between_warps(Words out) {
  __shared__ uint32_t words[kThreads];
  words[thread()] = thread();
  __syncwarp();
  const uint32_t other = words[thread() ^ 32];
  if (other > kThreads) out[0] = other;
  __syncthreads();
}

void overwritten_before_all_have_read(Words out) {
  __shared__ uint32_t words[kThreads];
  uint32_t sum = 0;
  for (uint32_t round = 0; round < 3; ++round) {
    words[thread()] = round;
    __syncthreads();
    sum += words[thread() ^ 32];
  }
  if (first_block()) out[thread()] = sum;
}

void async_copy_read_before_the_barrier(Words out) {
  uint32_t* words = reinterpret_cast<uint32_t*>(ptx::dynamic_shared());
  if (thread() % 4 == 0) ptx::copy_async_16(words + thread(), out + thread());
  ptx::wait_for_copies();
  if (words[thread() ^ 32] > kThreads) out[0] = 1;
}

// ---- misuse ---------------------------------------------------------------------------------

void barrier_in_one_branch(Words out) {
  if (thread() < 32) __syncthreads();
  if (first_block()) out[thread()] = thread();
}

void mask_names_lanes_that_never_come(Words out) {
  if (thread() < 16 && first_block()) out[thread()] = ptx::shuffle_xor(thread(), 1);
}

void lane_outside_its_own_mask(Words) { __syncwarp(0xFFFF); }

void two_collectives_meet(Words) {
  if (thread() % 2 == 0) {
    __syncwarp();
  } else {
    ptx::shuffle_xor(thread(), 1);
  }
}

void vector_is_misaligned(Words out) { ptx::store_streaming_16(out + 1, uint4{}); }

// ---- accesses out of bounds -----------------------------------------------------------------

void one_word_behind_global_memory(Words out) {
  if (first_block()) ptx::store_4(out + thread() + 1, 0);
}

void one_word_behind_shared_memory(Words) {
  reinterpret_cast<uint32_t*>(ptx::dynamic_shared())[thread() + 1] = 0;
}

// ---- correct kernels ------------------------------------------------------------------------

void reversed_through_shared_memory(Words out) {
  __shared__ uint32_t words[kThreads];
  for (uint32_t round = 0; round < 3; ++round) {
    words[thread()] = thread() + round;
    __syncthreads();
    const uint32_t other = words[kThreads - 1 - thread()];
    if (first_block()) out[kThreads - 1 - thread()] = other - round;
    __syncthreads();
  }
}

void swapped_inside_warps(Words out) {
  __shared__ uint32_t words[kThreads];
  for (uint32_t round = 0; round < 3; ++round) {
    words[thread()] = thread() + round;
    __syncwarp();
    const uint32_t other = words[thread() ^ 1];
    __syncwarp();
    if (first_block()) out[thread() ^ 1] = other - round;
  }
}

void shuffled_by_half_a_warp(Words out) {
  if (thread() % 32 >= 16) {
    if (first_block()) out[thread()] = thread();
    return;
  }
  const uint32_t other = __shfl_xor_sync(0xFFFF, thread(), 5);
  if (first_block()) out[thread() ^ 5] = other;
}

void copied_asynchronously(Words out) {
  if (!first_block()) return;
  uint32_t* words = reinterpret_cast<uint32_t*>(ptx::dynamic_shared());
  if (thread() % 4 == 0) ptx::copy_async_16(words + thread(), out + thread());
  ptx::wait_for_copies();
  __syncthreads();
  out[thread() ^ 32] = words[thread() ^ 32];
}

void added_by_all_blocks(Words out) {
  uint64_t* sums = reinterpret_cast<uint64_t*>(out);
  ptx::add_u64(sums + thread() / 2, 1);
  ptx::add_u64(sums + thread() / 2, UINT64_MAX);
}

// Nothing is in shared memory before it is written, or waited for.
void sees_garbage_in_shared_memory(Words out) {
  if (!first_block()) return;
  __shared__ uint32_t words[kThreads];
  uint32_t* dynamic = reinterpret_cast<uint32_t*>(ptx::dynamic_shared());
  const uint32_t kGarbage = 0x7FFF7FFF;
  if (thread() % 4 == 0) ptx::copy_async_16(dynamic + thread(), out + thread());
  const bool garbage = words[thread()] == kGarbage && dynamic[thread()] == kGarbage;
  __syncthreads();
  ptx::wait_for_copies();
  __syncthreads();
  out[thread()] = garbage ? thread() : 0;
}

// ---- schedules ------------------------------------------------------------------------------

void order_of_the_threads(Words out) {
  if (first_block()) out[1 + atomicAdd(out, 1u) % (kThreads - 1)] = thread();
}

#define CONTROL(name) {#name, name}
const std::map<std::string, Kernel> kKernels = {
    CONTROL(two_threads_write_one_word),
    CONTROL(two_blocks_write_one_word),
    CONTROL(neighbour_read_without_syncwarp),
    CONTROL(shuffle_is_no_fence),
    CONTROL(syncwarp_between_warps),
    CONTROL(overwritten_before_all_have_read),
    CONTROL(async_copy_read_before_the_barrier),
    CONTROL(barrier_in_one_branch),
    CONTROL(mask_names_lanes_that_never_come),
    CONTROL(lane_outside_its_own_mask),
    CONTROL(two_collectives_meet),
    CONTROL(vector_is_misaligned),
    CONTROL(one_word_behind_global_memory),
    CONTROL(one_word_behind_shared_memory),
    CONTROL(reversed_through_shared_memory),
    CONTROL(swapped_inside_warps),
    CONTROL(shuffled_by_half_a_warp),
    CONTROL(copied_asynchronously),
    CONTROL(added_by_all_blocks),
    CONTROL(sees_garbage_in_shared_memory),
    CONTROL(order_of_the_threads),
};
#undef CONTROL

// Every word of the result of a correct kernel is its own index, as it was before.
std::vector<uint32_t> run(const std::string& name, uint64_t seed) {
  std::vector<uint32_t> words(kThreads);
  std::iota(words.begin(), words.end(), 0u);
  words.shrink_to_fit();
  cuemu::Launch launch;
  launch.grid.x = 3;
  launch.block.x = kThreads;
  launch.dynamic_shared_bytes = kThreads * sizeof(uint32_t);
  launch.seed = seed;
  launch.wave = 2;
  const Kernel kernel = kKernels.at(name);
  cuemu::launch(launch, [&] { kernel(words.data()); });
  return words;
}

bool is_right(const std::vector<uint32_t>& words) {
  for (uint32_t i = 0; i < kThreads; ++i) {
    if (words[i] != i) return false;
  }
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  const std::string name = argv[1];
  try {
    const std::vector<uint32_t> words = run(name, std::strtoull(argv[2], nullptr, 10));
    if (name == "order_of_the_threads") {
      for (uint32_t word : words) std::printf("%u ", word);
    } else {
      std::puts(is_right(words) ? "ok" : "wrong result");
    }
  } catch (const cuemu::Error& error) {
    std::printf("reported: %s\n", error.what());
  }
  return 0;
}
