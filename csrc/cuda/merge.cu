// W' = round(W + scale * B @ A), straight from the trainer's adapter shards into the destination,
// with the digest of what was written and the fidelity sums (block.h: MergeBlock, MergeSums).
//
// A thread block takes a strip of rows, keeps their part of B in shared memory, and walks the
// columns tile by tile: loads of W are in flight while A arrives and the tensor cores multiply.
#include <cstdint>
#include <utility>

#include "cuda/kernels.h"
#include "cuda/merge_edge.cuh"
#include "cuda/merge_multiply.cuh"
#include "cuda/merge_operands.cuh"
#include "cuda/merge_shape.h"
#include "cuda/merge_strip.cuh"
#include "cuda/merge_tally.cuh"
#include "cuda/merge_write.cuh"

namespace lora_refit::cuda {
namespace {

// The dtypes of W and of W' as one number, uniform over a strip.
__device__ constexpr int dtype_pair(DType weight, DType dst) {
  return static_cast<int>(weight) * kDTypeCount + static_cast<int>(dst);
}

template <int kPair>
inline constexpr DType kWeightOf = static_cast<DType>(kPair / kDTypeCount);
template <int kPair>
inline constexpr DType kOutOf = static_cast<DType>(kPair % kDTypeCount);

using AllPairs = std::make_integer_sequence<int, kDTypeCount * kDTypeCount>;

template <int... kPairs>
__device__ __forceinline__ void write_wide(int pair, const Products& products, WeightsAhead& ahead,
                                           const Tile& tile, MergeTally& tally,
                                           std::integer_sequence<int, kPairs...>) {
  ((pair == kPairs &&
    (write_octets<kWeightOf<kPairs>, kOutOf<kPairs>>(products, ahead, tile, tally), true)) ||
   ...);
}

template <int... kPairs>
__device__ __forceinline__ void write_narrow(int pair, const Products& products, float* staged,
                                             const Tile& tile, MergeTally& tally,
                                             std::integer_sequence<int, kPairs...>) {
  __syncthreads();  // A, whose memory is reused, has been read
  stage_products(staged, products, tile);
  __syncthreads();
  ((pair == kPairs &&
    (write_elements<kWeightOf<kPairs>, kOutOf<kPairs>>(staged, tile, tally), true)) ||
   ...);
}

// Shared memory of a block beside the operands.
struct MergeShared {
  WordWeights words;
  ChunkWeights chunks;
  StripWork strip;
};

__device__ __forceinline__ void fill_chunk_weights(MergeShared& shared, const Tile& tile) {
  const int64_t bytes = element_bytes(tile.strip.dst_dtype);
  const bool has_one_before = tile.col != tile.strip.col;
  fill_chunk_weights(shared.chunks, tile.strip.dst_byte + tile.col * bytes, tile.strip.dst_pitch,
                     has_one_before ? kMergeCols * bytes : 0);
}

// Stages A of the tile, and B where it does not stay.
template <DType kAdapter>
__device__ __forceinline__ void stage_operands(const Operands<kAdapter>& operands, int64_t k,
                                               const Tile& tile, MergeShared& shared) {
  __syncthreads();  // the tile before, and what the strip has staged of B, are done
  if (tile.row == 0 && k == 0) fill_chunk_weights(shared, tile);
  if (!operands.b_stays()) operands.stage_b(k, tile.row, kTileRows);
  operands.stage_a(k, tile);
  ptx::wait_for_copies();
  __syncthreads();
}

template <DType kAdapter>
__device__ __forceinline__ void merge_tile(const Operands<kAdapter>& operands, const Tile& tile,
                                           MergeShared& shared, MergeTally& tally) {
  using Shape = MergeShape<kAdapter>;
  static_assert(kStagedBytes <= Shape::kColsBytes);
  const StripWork& strip = tile.strip;
  const bool wide = strip.wide && tile.cols % 8 == 0;
  WeightsAhead ahead;
  if (wide) {
    if (strip.weight_dtype == DType::kF32) {
      load_octets<4>(ahead, tile, 0, kOctetsAhead<4>);
    } else {
      load_octets<2>(ahead, tile, 0, kOctetsAhead<2>);
    }
  }
  Products products;
  products.fill(0.0f);
  int64_t k = 0;
  do {
    const bool a_stays = operands.b_stays() && wide;
    if (tile.row == 0 || !a_stays) stage_operands(operands, k, tile, shared);
    const int first_row = operands.b_stays() ? tile.row : 0;
    multiply_tile<kAdapter>(products, operands.rows() + first_row * Shape::kRowPitch,
                            operands.cols(), operands.padded_depth(k), tile.place);
    k += Shape::kDepth;
  } while (k < strip.depth);
  const int pair = dtype_pair(strip.weight_dtype, strip.dst_dtype);
  if (wide) {
    write_wide(pair, products, ahead, tile, tally, AllPairs());
  } else {
    write_narrow(pair, products, reinterpret_cast<float*>(operands.cols()), tile, tally,
                 AllPairs());
  }
}

template <DType kAdapter>
__device__ __forceinline__ void merge_strip(const MergeArguments& arguments, MergeShared& shared) {
  const StripWork& strip = shared.strip;
  const Operands<kAdapter> operands = {arguments, strip};
  MergeTally tally;
  if (operands.b_stays()) operands.stage_b(0, 0, kMergeRows);
#pragma unroll 1
  for (int64_t col = 0; col < strip.cols; col += kMergeCols) {
    const int64_t left = strip.cols - col;
    const int cols = static_cast<int>(left < kMergeCols ? left : kMergeCols);
#pragma unroll 1
    for (int row = 0; row < strip.rows; row += kTileRows) {
      const Tile tile = {strip, shared.words, shared.chunks,  warp_place(),
                         row,   cols,         strip.col + col};
      merge_tile<kAdapter>(operands, tile, shared, tally);
    }
  }
  MergeSums* sums = &arguments.sums[strip.module];
  add_tally(tally, strip.scale, &arguments.digests[strip.dst_index], sums);
  if (threadIdx.x == 0) {
    ptx::add_u64(&sums->elements, static_cast<uint64_t>(strip.rows) * strip.cols);
  }
}

template <DType kAdapter>
__device__ __forceinline__ void merge_strips(const MergeArguments& arguments) {
  __shared__ MergeShared shared;
  fill_word_weights(shared.words);
#pragma unroll 1
  for (int64_t i = blockIdx.x; i < arguments.strip_count; i += gridDim.x) {
    __syncthreads();  // the strip before is done
    if (threadIdx.x == 0) shared.strip = prepare_strip(arguments, arguments.strips[i]);
    __syncthreads();
    merge_strip<kAdapter>(arguments, shared);
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 2)
    lora_refit_merge_f32(const __grid_constant__ MergeArguments arguments) {
  merge_strips<DType::kF32>(arguments);
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
    lora_refit_merge_f16(const __grid_constant__ MergeArguments arguments) {
  merge_strips<DType::kF16>(arguments);
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
    lora_refit_merge_bf16(const __grid_constant__ MergeArguments arguments) {
  merge_strips<DType::kBF16>(arguments);
}

}  // namespace lora_refit::cuda
