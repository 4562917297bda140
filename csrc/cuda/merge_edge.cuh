// Adds a tile's products to W and writes W' element by element: any alignment, any column count.
#pragma once

#include <cstdint>

#include "cuda/merge_write.cuh"

namespace lora_refit::cuda {

// The products of a tile pass through shared memory.
inline constexpr int kStagedBytes = kTileRows * kMergeCols * 4;

// Row `row` of the strip, column `col` of the tile.
template <DType kWeight, DType kOut>
__device__ __forceinline__ void write_element(float product, int row, int col, const Tile& tile,
                                              MergeTally& tally) {
  constexpr int kWeightBytes = element_bytes(kWeight);
  constexpr int kOutBytes = element_bytes(kOut);
  const std::byte* weight_row = tile.strip.weight + row * tile.strip.weight_pitch;
  const auto in = load_packet<kWeightBytes>(weight_row + (tile.col + col) * kWeightBytes);
  const uint32_t words[2] = {in.words[0], 0};
  uint32_t out[2];
  // The second element is a zero that stays one.
  merge_pair<kWeight, kOut>(widen_pair_at<kWeight>(words, 0), {product, 0.0f}, tile.strip.scale,
                            out, tally);
  const uint64_t byte = static_cast<uint64_t>(tile.strip.dst_byte + row * tile.strip.dst_pitch +
                                              (tile.col + col) * kOutBytes);
  const Packet<kOutBytes> packet = {out[0]};
  store_packet(tile.strip.dst + byte, packet);
  tally.digest += weigh(tile.weights, packet, byte) * tile.chunks.of[row][byte / kChunkBytes % 2];
}

template <DType kWeight, DType kOut>
__device__ __forceinline__ void write_elements(const float* staged, const Tile& tile,
                                               MergeTally& tally) {
  const int col = threadIdx.x % kMergeCols;
  if (col >= tile.cols) return;
  const int left = tile.strip.rows - tile.row;
  const int rows = left < kTileRows ? left : kTileRows;
#pragma unroll 1
  for (int row = threadIdx.x / kMergeCols; row < rows; row += kThreads / kMergeCols) {
    write_element<kWeight, kOut>(staged[row * kMergeCols + col], tile.row + row, col, tile, tally);
  }
}

// Spreads the lanes' products over `staged`, row by row.
__device__ __forceinline__ void stage_products(float* staged, const Products& products,
                                               const Tile& tile) {
  const LaneOctets octets = lane_octets(tile);
#pragma unroll
  for (int octet = 0; octet < kOctets; ++octet) {
    const int row = octets.row - tile.row + octet * kOctetRows;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      staged[row * kMergeCols + octets.col + i] = products.at(octet, i);
    }
  }
}

}  // namespace lora_refit::cuda
