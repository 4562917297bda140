// Executes a block list: moves, casts, scales, zero-fills, and adds up the digest of what it wrote.
// One warp takes one tile at a time. The result has the bits of the CPU's copy (cpu/piece.cpp).
#include <cstdint>
#include <utility>

#include "cuda/digest_parts.cuh"
#include "cuda/kernels.h"
#include "cuda/packet.cuh"
#include "cuda/unit_walk.cuh"

namespace lora_refit::cuda {
namespace {

template <DType kSrc, DType kDst, Scaling kScaling>
struct Convert {
  static constexpr int kSrcBytes = element_bytes(kSrc);
  static constexpr int kDstBytes = element_bytes(kDst);
  static constexpr bool kZeros = false;

  template <int kElements>
  __device__ __forceinline__ static Packet<kElements * kDstBytes> apply(
      const Packet<kElements * kSrcBytes>& in, float scale) {
    if constexpr (kSrc == kDst && kScaling == Scaling::kNone) {
      return in;
    } else {
      Packet<kElements * kDstBytes> out = {};
#pragma unroll
      for (int i = 0; i < kElements; ++i) {
        const auto bits = convert<kSrc, kDst, kScaling>(get_element<kSrc>(in, i), scale);
        set_element<kDst>(out, i, bits);
      }
      return out;
    }
  }
};

template <int kBytes>
struct ZeroFill {
  static constexpr int kSrcBytes = kBytes;
  static constexpr int kDstBytes = kBytes;
  static constexpr bool kZeros = true;
};

// What a warp moves at a time: units of one size, all of one tile. It lives in shared memory, one
// for each warp, because all lanes need the same and registers are short.
struct Move {
  UnitWalk units;
  std::byte* dst;  // the base of the destination buffer
  float scale;
};

template <class Variant, int kElements>
__device__ __forceinline__ void move_units(const Move& move, const WordWeights& weights,
                                           DigestSum& sum) {
  constexpr int kSrcBytes = kElements * Variant::kSrcBytes;
  constexpr int kDstBytes = kElements * Variant::kDstBytes;
  constexpr int kInFlight = kSrcBytes > 16 ? 2 : 4;
  const uint32_t count = move.units.count;
  for (uint32_t unit = threadIdx.x % kWarpThreads; unit < count;) {
    Packet<kSrcBytes> in[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight && !Variant::kZeros; ++i) {
      // Past the end the last unit is read again: a load that may not happen would keep its
      // registers occupied all through the kernel.
      const uint32_t ahead = min(unit + i * kWarpThreads, count - 1);
      in[i] = load_packet<kSrcBytes>(move.units.source(ahead));
    }
#pragma unroll 1
    for (int i = 0; i < kInFlight && unit < count; ++i, unit += kWarpThreads) {
      const uint64_t byte = move.units.destination(unit);
      if constexpr (Variant::kZeros) {
        store_packet(move.dst + byte, Packet<kDstBytes>{});  // adds nothing to a digest
      } else {
        const auto out = Variant::template apply<kElements>(in[0], move.scale);
        store_packet(move.dst + byte, out);
        sum.add(byte / kChunkBytes, weigh(weights, out, byte));
#pragma unroll
        for (int next = 1; next < kInFlight; ++next) in[next - 1] = in[next];
      }
    }
  }
}

template <class Variant>
__device__ __forceinline__ void move_units(int unit_elements, const Move& move,
                                           const WordWeights& weights, DigestSum& sum) {
  constexpr int kVector = 16 / Variant::kDstBytes;
  if (unit_elements == kVector) {
    move_units<Variant, kVector>(move, weights, sum);
  } else if (unit_elements == 1) {
    move_units<Variant, 1>(move, weights, sum);
  } else if constexpr (Variant::kDstBytes == 2) {
    move_units<Variant, 2>(move, weights, sum);
  }
}

// The inverse of copy_variant.
template <int kVariant>
using VariantAt = Convert<static_cast<DType>(kVariant / kScalingCount / kDTypeCount),
                          static_cast<DType>(kVariant / kScalingCount % kDTypeCount),
                          static_cast<Scaling>(kVariant % kScalingCount)>;

template <int... kVariants>
__device__ __forceinline__ void move_units(int variant, int unit_elements, const Move& move,
                                           const WordWeights& weights, DigestSum& sum,
                                           std::integer_sequence<int, kVariants...>) {
  if (variant == kZeroFillVariant2) {
    move_units<ZeroFill<2>>(unit_elements, move, weights, sum);
  } else if (variant == kZeroFillVariant4) {
    move_units<ZeroFill<4>>(unit_elements, move, weights, sum);
  } else {
    ((variant == kVariants &&
      (move_units<VariantAt<kVariants>>(unit_elements, move, weights, sum), true)) ||
     ...);
  }
}

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

__device__ __forceinline__ int log2_source_bytes(int variant) {
  if (variant >= kZeroFillVariant2) return variant == kZeroFillVariant2 ? 1 : 2;
  return element_bytes(static_cast<DType>(variant / kScalingCount / kDTypeCount)) == 4 ? 2 : 1;
}

__device__ __forceinline__ int log2_destination_bytes(int variant) {
  if (variant >= kZeroFillVariant2) return log2_source_bytes(variant);
  return element_bytes(static_cast<DType>(variant / kScalingCount % kDTypeCount)) == 4 ? 2 : 1;
}

// Plans the move of the columns from `col` on in units of one size. Returns how many units a row
// has, 0 where none fits. All lanes call it.
__device__ __forceinline__ int plan_move(const CopyTile& tile, const CopyArguments& arguments,
                                         int col, int log2_elements, Move& move) {
  const CopyBlock& box = tile.box;
  // The source strides of a zero fill repeat its destination's (plan/loops.h), so they fit as well.
  const uint64_t src_base = box.src == kZeroFill ? 0 : arguments.src_addresses[box.src];
  const uint64_t dst_base = arguments.dst_addresses[box.dst];
  const BoxSide src = {src_base, box.src_offset, box.src_stride, log2_source_bytes(tile.variant)};
  const BoxSide dst = {dst_base, box.dst_offset, box.dst_stride,
                       log2_destination_bytes(tile.variant)};
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
  int log2_elements = 4 - log2_destination_bytes(tile.variant);
  for (int col = 0; col < tile.box.size[2]; log2_elements = log2_elements == 3 ? 1 : 0) {
    const int units = plan_move(tile, arguments, col, log2_elements, move);
    if (units == 0) continue;
    move_units(tile.variant, 1 << log2_elements, move, weights, sum,
               std::make_integer_sequence<int, kZeroFillVariant2>());
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
