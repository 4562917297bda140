// What the portable and the AVX2 merge kernels share: the walk over rows and digest chunks, and the
// table of instantiations.
#pragma once

#include "cpu/merge_kernels.h"
#include "cpu/row_walk.h"

namespace lora_refit {

// Run::write(weight, products, dst, first, count, scale, tally) merges `count` elements, the first
// of which is element `first` of a digest chunk, and returns their weighted sum.
template <class Run>
void walk_merge_rows(const MergeRowsJob& job, MergeTally& tally) {
  walk_chunks<Run::kOut>(job.rows, job.cols, job.dst_position, job.dst_row_elements, tally.digest,
                         [&](int64_t row, int64_t col, int64_t first, int64_t count) {
                           const std::byte* weight = job.weight + row * job.weight_row_bytes;
                           std::byte* dst = job.dst + row * job.dst_row_bytes;
                           const float* products = job.products[row * job.panels].values;
                           return Run::write(weight + col * element_bytes(Run::kWeight),
                                             products + col, dst + col * element_bytes(Run::kOut),
                                             first, count, job.scale, tally);
                         });
}

using MergeWriter = void (*)(const MergeRowsJob&, MergeTally&);

template <template <DType, DType> class Run, DType kWeight>
MergeWriter select_merge_dst(DType dst) {
  switch (dst) {
    case DType::kF32:
      return walk_merge_rows<Run<kWeight, DType::kF32>>;
    case DType::kF16:
      return walk_merge_rows<Run<kWeight, DType::kF16>>;
    case DType::kBF16:
      return walk_merge_rows<Run<kWeight, DType::kBF16>>;
  }
  return nullptr;
}

template <template <DType, DType> class Run>
MergeWriter select_merge_writer(DType weight, DType dst) {
  switch (weight) {
    case DType::kF32:
      return select_merge_dst<Run, DType::kF32>(dst);
    case DType::kF16:
      return select_merge_dst<Run, DType::kF16>(dst);
    case DType::kBF16:
      return select_merge_dst<Run, DType::kBF16>(dst);
  }
  return nullptr;
}

}  // namespace lora_refit
