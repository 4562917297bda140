// Adds a tile's products to W and writes W', where both allow 16-byte accesses.
#pragma once

#include <cstdint>

#include "cuda/merge_multiply.cuh"
#include "cuda/merge_strip.cuh"
#include "cuda/merge_tally.cuh"
#include "cuda/packet.cuh"

namespace lora_refit::cuda {

struct Tile {
  const StripWork& strip;
  const WordWeights& weights;
  const ChunkWeights& chunks;
  WarpPlace place;
  int row;      // first row, from the strip's first
  int cols;     // up to kMergeCols
  int64_t col;  // first column, from the block's first
};

// A lane's products are four octets: eight neighbouring columns of rows eight apart.
inline constexpr int kOctets = kWarpRows / 8;
inline constexpr int kOctetRows = 8;

struct LaneOctets {
  int row;        // of the first, in the strip
  int col;        // in the tile
  int rows_left;  // from `row` on; none if not positive, or if the columns are outside

  __device__ __forceinline__ bool has(int octet) const { return octet * kOctetRows < rows_left; }
};

__device__ __forceinline__ LaneOctets lane_octets(const Tile& tile) {
  const int row = tile.row + tile.place.row + tile.place.lane / 4;
  const int col = tile.place.col + tile.place.lane % 4 * 8;
  return {row, col, col < tile.cols ? tile.strip.rows - row : 0};
}

// W of a lane's next octets, on its way: as many as these registers hold.
struct WeightsAhead {
  uint32_t words[16];
};

template <int kBytes>  // of an element of W
inline constexpr int kOctetsAhead = 8 / kBytes;

// Loads octets `first` to `end` - 1 as far as they exist.
template <int kBytes>
__device__ __forceinline__ void load_octets(WeightsAhead& ahead, const Tile& tile, int first,
                                            int end) {
  constexpr int kWords = 2 * kBytes;
  const LaneOctets octets = lane_octets(tile);
  const std::byte* from =
      tile.strip.weight + octets.row * tile.strip.weight_pitch + (tile.col + octets.col) * kBytes;
  const int64_t step = tile.strip.weight_pitch * kOctetRows;
#pragma unroll
  for (int octet = first; octet < end; ++octet) {
    if (!octets.has(octet)) break;
    const auto packet = load_packet<4 * kWords>(from + octet * step);
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      ahead.words[octet % kOctetsAhead<kBytes> * kWords + i] = packet.words[i];
    }
  }
}

template <DType kWeight, DType kOut>
__device__ __forceinline__ void write_octets(const Products& products, WeightsAhead& ahead,
                                             const Tile& tile, MergeTally& tally) {
  constexpr int kWeightBytes = element_bytes(kWeight);
  constexpr int kOutBytes = element_bytes(kOut);
  constexpr int kAhead = kOctetsAhead<kWeightBytes>;
  constexpr int kPackets = kOutBytes / 2;
  const LaneOctets octets = lane_octets(tile);
  std::byte* const dst = tile.strip.dst;
  const uint64_t step = tile.strip.dst_pitch * kOctetRows;
  const float scale = tile.strip.scale;
  uint64_t byte =
      tile.strip.dst_byte + octets.row * tile.strip.dst_pitch + (tile.col + octets.col) * kOutBytes;
#pragma unroll
  for (int octet = 0; octet < kOctets; ++octet, byte += step) {
    if (!octets.has(octet)) break;
    if (octet == kAhead) load_octets<kWeightBytes>(ahead, tile, kAhead, kOctets);
    const uint32_t* weights = &ahead.words[octet % kAhead * 2 * kWeightBytes];
    Packet<16> out[kPackets];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 product = {products.at(octet, 2 * i), products.at(octet, 2 * i + 1)};
      const int word = i * kPackets;
      merge_pair<kWeight, kOut>(widen_pair_at<kWeight>(weights, i), product, scale,
                                &out[word / 4].words[word % 4], tally);
    }
#pragma unroll
    for (int i = 0; i < kPackets; ++i) {
      const uint64_t at = byte + 16 * i;
      store_packet(dst + at, out[i]);
      tally.digest += weigh(tile.weights, out[i], at) *
                      tile.chunks.of[octets.row + octet * kOctetRows][at / kChunkBytes % 2];
    }
  }
}

}  // namespace lora_refit::cuda
