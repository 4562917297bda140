// What a launch needs to know of the CUDA kernels: names, argument structs, tables. Plain C++, read
// by nvcc and by the host's launcher. Everything that pointers refer to is device memory.
#pragma once

#include <cstdint>

#include "block.h"
#include "convert.h"

namespace lora_refit::cuda {

inline constexpr int kThreads = 256;
inline constexpr int kWarpThreads = 32;

// ---- copy -----------------------------------------------------------------------------------

// What a box does to its elements; selects the instantiation inside the copy kernel.
constexpr int32_t copy_variant(DType src, DType dst, Scaling scaling) {
  return (static_cast<int32_t>(src) * kDTypeCount + static_cast<int32_t>(dst)) * kScalingCount +
         static_cast<int32_t>(scaling);
}
inline constexpr int32_t kZeroFillVariant2 = kDTypeCount * kDTypeCount * kScalingCount;  // 2-byte
inline constexpr int32_t kZeroFillVariant4 = kZeroFillVariant2 + 1;                      // 4-byte

// A box of a block list (plan/boxes.h): the work of one warp. At most kBoxBytes of the destination,
// so at most 8192 elements.
struct CopyTile {
  CopyBlock box;
  int32_t variant;
  int32_t reserved;
};
static_assert(sizeof(CopyTile) == 112);

inline constexpr int64_t kBoxBytes = 16 * 1024;

struct CopyArguments {
  const CopyTile* tiles;
  int64_t tile_count;
  const uint64_t* src_addresses;  // one base address per source buffer, of its dtype's alignment
  const uint64_t* dst_addresses;
  uint64_t* digests;  // one per destination; the kernel adds to what is there
};

inline constexpr char kCopyKernel[] = "lora_refit_copy";

// ---- digest ---------------------------------------------------------------------------------

struct DigestBuffer {
  uint64_t address;     // even
  int64_t bytes;        // a multiple of 2
  int64_t first_chunk;  // chunks of kChunkBytes in all buffers before this one
};

struct DigestArguments {
  const DigestBuffer* buffers;
  int64_t buffer_count;
  int64_t chunk_count;  // in all buffers
  uint64_t* digests;    // one per buffer; the kernel adds to what is there
};

inline constexpr char kDigestKernel[] = "lora_refit_digest";

// ---- merge ----------------------------------------------------------------------------------

// Work of one thread block: up to kMergeRows rows of one merge block, over the columns from `col`
// on, kMergeCols at a time. B's rows stay in shared memory meanwhile if the rank allows.
inline constexpr int kMergeRows = 128;
inline constexpr int kMergeCols = 128;

struct MergeStrip {
  int32_t block;
  int32_t rows;  // 1 to kMergeRows
  int64_t row;   // first row, from the block's first
  int64_t col;   // first column, a multiple of kMergeCols
  int64_t cols;
};

struct MergeArguments {
  const MergeStrip* strips;
  int64_t strip_count;
  const MergeBlock* blocks;
  const MergeSegment* segments;
  const int32_t* src_dtypes;  // DType of each source and destination buffer
  const int32_t* dst_dtypes;
  const uint64_t* src_addresses;
  const uint64_t* dst_addresses;
  uint64_t* digests;  // one per destination; added to
  MergeSums* sums;    // one per module; added to
};

// One kernel per dtype of A and B, by DType. Launched with merge_shared_bytes() of dynamic shared
// memory (cuda/merge_shape.h).
inline constexpr const char* kMergeKernels[kDTypeCount] = {
    "lora_refit_merge_f32", "lora_refit_merge_f16", "lora_refit_merge_bf16"};

}  // namespace lora_refit::cuda
