// The block list: what one copy program moves, and the digest of what it wrote.
// lora_refit.kernels.BLOCK_DTYPE is the numpy twin of CopyBlock.
#pragma once

#include <cstddef>
#include <cstdint>

// The CUDA kernels share this arithmetic with the CPU's.
#if defined(__CUDACC__)
#define LORA_REFIT_HOST_DEVICE __host__ __device__
#else
#define LORA_REFIT_HOST_DEVICE
#endif

namespace lora_refit {

enum class DType : int32_t { kF32 = 0, kF16 = 1, kBF16 = 2 };
inline constexpr int kDTypeCount = 3;

LORA_REFIT_HOST_DEVICE constexpr int64_t element_bytes(DType dtype) {
  return dtype == DType::kF32 ? 4 : 2;
}

// A strided box of elements that moves from one source buffer to one destination buffer.
// Offsets, sizes and strides are in elements; the three loops are batch, row and column.
// Source strides may be zero or negative. A destination must not alias itself.
struct CopyBlock {
  int32_t src;  // index into the source buffers, or kZeroFill
  int32_t dst;  // index into the destination buffers
  int64_t src_offset;
  int64_t dst_offset;
  int64_t size[3];
  int64_t src_stride[3];
  int64_t dst_stride[3];
  float scale;
  uint32_t flags;
};

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "digests and blocks are little-endian");
static_assert(sizeof(CopyBlock) == 104, "CopyBlock is packed: Python and CUDA share this layout");
static_assert(offsetof(CopyBlock, src_stride) == 48 && offsetof(CopyBlock, scale) == 96);

inline constexpr int32_t kZeroFill = -1;

// Scale in fp32 and round once. Without it a value is rounded to the destination's dtype, scaled,
// and rounded again, which is what torch does for `tensor.to(dtype).mul_(scale)`.
inline constexpr uint32_t kScaleOnce = 1;

// W' = round(W + scale * B @ A) on one rectangle of one weight. Offsets, sizes and strides are in
// elements. Columns are contiguous in W and in W'; rows may lie anywhere, so the row movement of a
// plan (fused qkv, gate and up) is a block for each run of rows.
struct MergeBlock {
  int32_t weight;  // index into the source buffers
  int32_t dst;     // index into the destination buffers
  int64_t weight_offset;
  int64_t dst_offset;
  int64_t rows;
  int64_t cols;
  int64_t weight_row_stride;
  int64_t dst_row_stride;
  int32_t first_segment;  // B @ A is the sum over `segment_count` K-segments: a TP-sharded A or B
  int32_t segment_count;  // is gathered by reading each rank's part where it lies
  int32_t module;         // whose fidelity sums this block adds to
  float scale;
};

// One run of the contracted dimension: B[row, k] at b_offset + row * b_row_stride + k * b_k_stride,
// A[k, col] at a_offset + k * a_k_stride + col * a_col_stride; row and col count from the block's
// first. All segments of a program have one dtype.
struct MergeSegment {
  int32_t b;  // indices into the source buffers
  int32_t a;
  int64_t b_offset;
  int64_t a_offset;
  int64_t b_row_stride;
  int64_t b_k_stride;
  int64_t a_k_stride;
  int64_t a_col_stride;
  int64_t rank;  // length of the segment
};

// What a merge did to one module, with D = scale * B @ A:
// ||round(W + D) - (W + D)|| / ||D|| is sqrt(residual / delta).
struct MergeSums {
  double residual;   // sum of (round(W + D) - (W + D))^2
  double delta;      // sum of D^2
  uint64_t changed;  // elements whose bits differ from W's, after a cast of W to W' dtype
  uint64_t elements;
};

static_assert(sizeof(MergeBlock) == 72 && sizeof(MergeSegment) == 64 && sizeof(MergeSums) == 32);

// The digest of a buffer, seen as little-endian 32-bit words w[j], is
//     sum over j of  w[j] * word_weight(j % 1024) * chunk_weight(j / 1024)   (mod 2^64).
// It is a sum, so any tiling in any order gives the same number; it is linear in the bits, so zero
// padding adds nothing; and all weights are odd, so every single flipped bit changes it.
inline constexpr int64_t kChunkWords = 1024;
inline constexpr int64_t kChunkBytes = kChunkWords * 4;

LORA_REFIT_HOST_DEVICE constexpr uint64_t splitmix64(uint64_t x) {
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

LORA_REFIT_HOST_DEVICE constexpr uint32_t word_weight(uint64_t index) {
  return static_cast<uint32_t>(splitmix64(index)) | 1u;
}

LORA_REFIT_HOST_DEVICE constexpr uint64_t chunk_weight(uint64_t chunk) {
  return splitmix64((1ull << 32) + chunk) | 1u;
}

}  // namespace lora_refit
