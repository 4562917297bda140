// Executes one tile of a merge program.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/merge_kernels.h"
#include "cpu/merge_tiles.h"

namespace lora_refit {

struct MergeDTypes {
  DType weight;
  DType dst;
  DType adapter;
};

// `segments` are the block's own. `src_addresses` are those of all sources, `dst` is that of the
// block's destination. Adds to `tally` what it wrote.
struct MergeTileJob {
  const MergeTile& tile;
  const MergeBlock& block;
  const MergeSegment* segments;
  MergeDTypes dtypes;
  Simd simd;
  const uint64_t* src_addresses;
  std::byte* dst;
};

void merge_tile(const MergeTileJob& job, MergeTally& tally);

}  // namespace lora_refit
