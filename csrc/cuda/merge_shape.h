// How a merge tile lies in shared memory and over the warps of a block. Plain C++, read by the
// kernel and by the host's launcher.
#pragma once

#include "cuda/kernels.h"

namespace lora_refit::cuda {

// A strip's rows are taken in tiles, each by eight warps as 2 x 4 with 32 rows and 32 columns.
inline constexpr int kTileRows = 64;
inline constexpr int kWarpRows = 32;
inline constexpr int kWarpCols = 32;
inline constexpr int kWarpsDown = kTileRows / kWarpRows;
static_assert(kWarpsDown * (kMergeCols / kWarpCols) * kWarpThreads == kThreads);
static_assert(kMergeRows % kTileRows == 0);

// Two operands lie in shared memory: B as rows[row][k], A as cols[k][column]. The pitches put the
// eight 16-byte rows of an ldmatrix, and the lanes of a tf32 fragment, into different banks.
template <DType kAdapter>
struct MergeShape {
  static constexpr int kBytes = static_cast<int>(element_bytes(kAdapter));
  static constexpr int kVector = 16 / kBytes;
  static constexpr int kStep = 32 / kBytes;    // K of one mma
  static constexpr int kDepth = 256 / kBytes;  // K that fits; a longer one is taken in turns
  static constexpr int kRowPitch = kDepth + kVector;
  static constexpr int kColPitch = kMergeCols + 8;
  static constexpr int kRowsBytes = kMergeRows * kRowPitch * kBytes;
  static constexpr int kColsBytes = kDepth * kColPitch * kBytes;
  static constexpr int kSharedBytes = kRowsBytes + kColsBytes;
};

// Dynamic shared memory of a launch of kMergeKernels[dtype].
constexpr int merge_shared_bytes(DType dtype) {
  switch (dtype) {
    case DType::kF16:
      return MergeShape<DType::kF16>::kSharedBytes;
    case DType::kBF16:
      return MergeShape<DType::kBF16>::kSharedBytes;
    default:
      return MergeShape<DType::kF32>::kSharedBytes;
  }
}

}  // namespace lora_refit::cuda
