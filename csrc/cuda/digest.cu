// Digests of contiguous buffers (block.h): one warp takes a few chunks at a time.
#include <cstdint>

#include "cuda/digest_parts.cuh"
#include "cuda/kernels.h"
#include "cuda/packet.cuh"

namespace lora_refit::cuda {
namespace {

// Chunks of one turn of a warp: enough to hide the search for their buffer and the atomic add.
constexpr int64_t kTurnChunks = 4;

// The buffer that holds `chunk`: the last one that begins at or before it, so never an empty one.
__device__ __forceinline__ int64_t buffer_of(const DigestArguments& arguments, int64_t chunk) {
  int64_t low = 0;
  int64_t high = arguments.buffer_count;
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    (arguments.buffers[middle].first_chunk <= chunk ? low : high) = middle;
  }
  return low;
}

// Weighs the bytes of one chunk from `begin` on, kBytes at a time; returns where it stopped. The
// lane's share is added to `weighted`.
template <int kBytes>
__device__ __forceinline__ int weigh_bytes(const WordWeights& weights, const std::byte* chunk,
                                           int begin, int end, uint64_t& weighted) {
  constexpr int kInFlight = 4;
  constexpr int kStep = kWarpThreads * kBytes;
  if (reinterpret_cast<uint64_t>(chunk) % kBytes != 0) return begin;
  const int stop = begin + (end - begin) / kBytes * kBytes;
  const int lane = threadIdx.x % kWarpThreads;
  for (int first = begin + lane * kBytes; first < stop; first += kInFlight * kStep) {
    Packet<kBytes> packet[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (first + i * kStep >= stop) break;
      packet[i] = load_packet<kBytes>(chunk + first + i * kStep);
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (first + i * kStep >= stop) break;
      weighted += weigh(weights, packet[i], first + i * kStep);
    }
  }
  return stop;
}

// The lane's share of chunk `number` of `buffer`.
__device__ __forceinline__ uint64_t digest_chunk(const WordWeights& weights,
                                                 const DigestBuffer& buffer, int64_t number) {
  const int64_t begin = number * kChunkBytes;
  const int64_t left = buffer.bytes - begin;
  const int bytes = static_cast<int>(left < kChunkBytes ? left : kChunkBytes);
  const std::byte* chunk = reinterpret_cast<const std::byte*>(buffer.address) + begin;
  uint64_t weighted = 0;
  int done = weigh_bytes<16>(weights, chunk, 0, bytes, weighted);
  done = weigh_bytes<4>(weights, chunk, done, bytes, weighted);
  weigh_bytes<2>(weights, chunk, done, bytes, weighted);
  return weighted * chunk_weight(static_cast<uint64_t>(number));
}

__device__ __forceinline__ void digest_chunks(const DigestArguments& arguments,
                                              const WordWeights& weights, int64_t chunk,
                                              int64_t end) {
  for (int64_t index = buffer_of(arguments, chunk); chunk < end; ++index) {
    const DigestBuffer buffer = arguments.buffers[index];
    const int64_t buffer_end = buffer.first_chunk + (buffer.bytes + kChunkBytes - 1) / kChunkBytes;
    uint64_t sum = 0;
    for (; chunk < end && chunk < buffer_end; ++chunk) {
      sum += digest_chunk(weights, buffer, chunk - buffer.first_chunk);
    }
    add_warp_sum(&arguments.digests[index], sum);
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 4)
    lora_refit_digest(const __grid_constant__ DigestArguments arguments) {
  __shared__ WordWeights weights;
  fill_word_weights(weights);
  constexpr int64_t kWarps = kThreads / kWarpThreads;
  const int64_t warp = blockIdx.x * kWarps + threadIdx.x / kWarpThreads;
  for (int64_t chunk = warp * kTurnChunks; chunk < arguments.chunk_count;
       chunk += gridDim.x * kWarps * kTurnChunks) {
    const int64_t end = chunk + kTurnChunks;
    digest_chunks(arguments, weights, chunk,
                  end < arguments.chunk_count ? end : arguments.chunk_count);
  }
}

}  // namespace lora_refit::cuda
