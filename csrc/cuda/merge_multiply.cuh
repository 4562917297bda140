// The matrix product of a tile: each warp multiplies its 32 rows of B with its 32 columns of A.
#pragma once

#include <cstdint>

#include "cuda/merge_stage.cuh"

namespace lora_refit::cuda {

inline constexpr int kRowTiles = kWarpRows / 16;
inline constexpr int kColTiles = kWarpCols / 8;

struct WarpPlace {
  int lane;
  int row;  // the warp's first in the tile
  int col;
};

__device__ __forceinline__ WarpPlace warp_place() {
  const int warp = threadIdx.x / kWarpThreads;
  return {static_cast<int>(threadIdx.x % kWarpThreads), warp % kWarpsDown * kWarpRows,
          warp / kWarpsDown * kWarpCols};
}

// What one lane holds of the warp's products, as mma leaves them and stage_cols has dealt them:
// rows lane / 4 + 8r for r below 4, and of each the columns 8 (lane % 4) + i for i below 8.
struct Products {
  ptx::Accumulator tiles[kRowTiles][kColTiles];

  __device__ __forceinline__ void fill(float value) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kColTiles; ++n) tiles[m][n] = {{value, value, value, value}};
    }
  }

  __device__ __forceinline__ float at(int r, int i) const {
    return tiles[r / 2][i / 2].r[r % 2 * 2 + i % 2];
  }
};

// bf16 and fp16, 16 of K at a time.
template <DType kAdapter>
__device__ __forceinline__ void multiply_halves(Products& products, const uint16_t* rows,
                                                const uint16_t* cols, int depth,
                                                const WarpPlace& place) {
  using Shape = MergeShape<kAdapter>;
  const int lane = place.lane;
  rows += (place.row + lane % 16) * Shape::kRowPitch + lane / 16 * 8;
  cols += lane % 16 * Shape::kColPitch + place.col + lane / 16 * 8;
#pragma unroll 1
  for (int k = 0; k < depth; k += Shape::kStep) {
    ptx::RowFragment b[kRowTiles];
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      b[m] = ptx::load_row_fragment(rows + m * 16 * Shape::kRowPitch + k);
    }
#pragma unroll
    for (int n = 0; n < kColTiles; n += 2) {
      ptx::ColFragment a[2];
      ptx::load_col_fragments(a, cols + k * Shape::kColPitch + n * 8);
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if constexpr (kAdapter == DType::kF16) {
            ptx::mma_f16(products.tiles[m][n + i], b[m], a[i]);
          } else {
            ptx::mma_bf16(products.tiles[m][n + i], b[m], a[i]);
          }
        }
      }
    }
  }
}

// fp32 x as big + small, both tf32: what is left is below 2^-21 |x|. An infinite x becomes NaN.
struct Tf32Split {
  uint32_t big;
  uint32_t small;
};

// big is rounded to nearest as cvt.rna.tf32.f32 does, whose own code spends more on infinities.
__device__ __forceinline__ Tf32Split split(uint32_t bits) {
  constexpr uint32_t kTf32 = 0xFFFFE000u;
  const uint32_t big = (bits + 0x1000u) & kTf32;
  const float left = float_from_bits(bits) - float_from_bits(big);
  return {big, bits_of_float(left) & kTf32};
}

// fp32 as three tf32 products, 8 of K at a time; small * small is below fp32's rounding.
__device__ __forceinline__ void multiply_floats(Products& products, const uint32_t* rows,
                                                const uint32_t* cols, int depth,
                                                const WarpPlace& place) {
  using Shape = MergeShape<DType::kF32>;
  const int lane = place.lane;
  rows += (place.row + lane / 4) * Shape::kRowPitch + lane % 4;
  cols += lane % 4 * Shape::kColPitch + place.col + lane / 4;
#pragma unroll 1
  for (int k = 0; k < depth; k += Shape::kStep) {
    ptx::RowFragment b_big[kRowTiles];
    ptx::RowFragment b_small[kRowTiles];
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = m * 16 + i % 2 * 8;
        const Tf32Split value = split(rows[row * Shape::kRowPitch + k + i / 2 * 4]);
        b_big[m].r[i] = value.big;
        b_small[m].r[i] = value.small;
      }
    }
#pragma unroll
    for (int n = 0; n < kColTiles; ++n) {
      ptx::ColFragment a_big;
      ptx::ColFragment a_small;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const Tf32Split value = split(cols[(k + i * 4) * Shape::kColPitch + n * 8]);
        a_big.r[i] = value.big;
        a_small.r[i] = value.small;
      }
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        ptx::mma_tf32(products.tiles[m][n], b_small[m], a_big);
        ptx::mma_tf32(products.tiles[m][n], b_big[m], a_small);
        ptx::mma_tf32(products.tiles[m][n], b_big[m], a_big);
      }
    }
  }
}

// Adds rows @ cols over `depth` of K, a multiple of the mma's, to `products`.
template <DType kAdapter>
__device__ __forceinline__ void multiply_tile(Products& products, const AdapterBits<kAdapter>* rows,
                                              const AdapterBits<kAdapter>* cols, int depth,
                                              const WarpPlace& place) {
  if constexpr (kAdapter == DType::kF32) {
    multiply_floats(products, rows, cols, depth, place);
  } else {
    multiply_halves<kAdapter>(products, rows, cols, depth, place);
  }
}

}  // namespace lora_refit::cuda
