// Executes a block list: moves, casts, scales, zero-fills, and adds up the digest of what it wrote.
// One warp takes one tile at a time. The result has the bits of the CPU's copy (cpu/piece.cpp).
#include <cstddef>
#include <cstdint>

#include "cuda/copy_move.cuh"
#include "cuda/copy_variants.cuh"
#include "cuda/digest_parts.cuh"
#include "cuda/kernels.h"
#include "cuda/unit_walk.cuh"

namespace lora_refit::cuda {
namespace {

// How many units `cols` columns from `col` on hold, if they are contiguous on that side and
// aligned: in memory, and from the buffer's base, from where the digest counts words.
__device__ __forceinline__ int row_units(const BoxSide& side, int col, int cols,
                                         int log2_elements) {
  const int log2_alignment = min(log2_elements + side.log2_bytes, 4);
  const uint64_t steps = side.bytes(side.stride[0] | side.stride[1]);
  const uint64_t all = side.base | side.byte_of_column(col) | steps;
  const bool fits = side.stride[2] == 1 && (all & ((1u << log2_alignment) - 1)) == 0;
  return fits ? cols >> log2_elements : 0;
}

// Plans the move of the columns from `col` on in units of one size. Returns how many units a row
// has, 0 where none fits. All lanes call it.
__device__ __forceinline__ int plan_move(const CopyTile& tile, const CopyArguments& arguments,
                                         int col, int log2_elements, Move& move) {
  const CopyBlock& box = tile.box;
  // The source strides of a zero fill repeat its destination's (plan/loops.h), so they fit as well.
  const uint64_t src_base = box.src == kZeroFill ? 0 : arguments.src_addresses[box.src];
  const uint64_t dst_base = arguments.dst_addresses[box.dst];
  const BoxSide src = {src_base, box.src_offset, box.src_stride, log2_src_bytes(tile.variant)};
  const BoxSide dst = {dst_base, box.dst_offset, box.dst_stride, log2_dst_bytes(tile.variant)};
  int units = static_cast<int>(box.size[2]) - col;
  if (log2_elements > 0) {
    const int cols = units;
    units = min(row_units(src, col, cols, log2_elements), row_units(dst, col, cols, log2_elements));
  }
  if (units > 0 && threadIdx.x % kWarpThreads == 0) {
    move = {walk_columns(box, src, dst, col, 1 << log2_elements, units),
            reinterpret_cast<std::byte*>(dst_base), box.scale};
  }
  __syncwarp();
  return units;
}

// Each unit size moves the columns it can, the largest first, and leaves the rest to the next.
__device__ __forceinline__ void move_tile(const CopyTile& tile, const CopyArguments& arguments,
                                          const WordWeights& weights, Move& move) {
  DigestSum sum;
  int log2_elements = 4 - log2_dst_bytes(tile.variant);
  for (int col = 0; col < tile.box.size[2]; log2_elements = log2_elements == 3 ? 1 : 0) {
    const int units = plan_move(tile, arguments, col, log2_elements, move);
    if (units == 0) continue;
    move_any(tile.variant, 1 << log2_elements, move, weights, sum);
    __syncwarp();
    col += units << log2_elements;
  }
  if (tile.box.src != kZeroFill) add_warp_sum(&arguments.digests[tile.box.dst], sum.value());
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 4)
    lora_refit_copy(const __grid_constant__ CopyArguments arguments) {
  constexpr int kWarps = kThreads / kWarpThreads;
  __shared__ WordWeights weights;
  __shared__ Move moves[kWarps];
  fill_word_weights(weights);
  const int warp = threadIdx.x / kWarpThreads;
  int64_t tile = int64_t{blockIdx.x} * kWarps + warp;
  for (; tile < arguments.tile_count; tile += int64_t{gridDim.x} * kWarps) {
    move_tile(arguments.tiles[tile], arguments, weights, moves[warp]);
  }
}

}  // namespace lora_refit::cuda
