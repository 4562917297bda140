// What the portable and the AVX2 row kernels share: the walk over rows and digest chunks, and the
// table of instantiations.
#pragma once

#include <algorithm>

#include "cpu/row_kernels.h"

namespace lora_refit {

template <DType kDType>
inline constexpr int64_t kChunkElements = kChunkBytes / element_bytes(kDType);

// Cuts each row where the digest's chunk changes. `visit(row, col, first, count)` handles `count`
// elements from `col` on, the first of which is element `first` of a chunk, and returns their
// weighted sum. `position` is the first row's in the buffer, and each row's is `row_step` further.
template <DType kDst, class Visit>
void walk_chunks(int64_t rows, int64_t cols, int64_t position, int64_t row_step, DigestSum& sum,
                 Visit visit) {
  constexpr uint64_t kChunk = kChunkElements<kDst>;
  for (int64_t row = 0; row < rows; ++row, position += row_step) {
    for (int64_t col = 0; col < cols;) {
      const uint64_t element = static_cast<uint64_t>(position + col);
      const int64_t first = static_cast<int64_t>(element % kChunk);
      const int64_t count = std::min(cols - col, static_cast<int64_t>(kChunk) - first);
      sum.add(element / kChunk, visit(row, col, first, count));
      col += count;
    }
  }
}

// Run::move(src, dst, first, count, scale) moves elements as walk_chunks says.
template <class Run>
void walk_rows(const RowsJob& job, DigestSum& sum) {
  walk_chunks<Run::kDst>(job.rows, job.cols, job.dst_position, job.dst_row_elements, sum,
                         [&](int64_t row, int64_t col, int64_t first, int64_t count) {
                           const std::byte* src = job.src + row * job.src_row_bytes;
                           std::byte* dst = job.dst + row * job.dst_row_bytes;
                           return Run::move(src + col * element_bytes(Run::kSrc),
                                            dst + col * element_bytes(Run::kDst), first, count,
                                            job.scale);
                         });
}

template <template <DType, DType, Scaling> class Run, DType kSrc, DType kDst>
RowsKernel select_scaling(Scaling scaling) {
  switch (scaling) {
    case Scaling::kNone:
      return walk_rows<Run<kSrc, kDst, Scaling::kNone>>;
    case Scaling::kAfterCast:
      return walk_rows<Run<kSrc, kDst, Scaling::kAfterCast>>;
    case Scaling::kBeforeCast:
      return walk_rows<Run<kSrc, kDst, Scaling::kBeforeCast>>;
  }
  return nullptr;
}

template <template <DType, DType, Scaling> class Run, DType kSrc>
RowsKernel select_dst(DType dst, Scaling scaling) {
  switch (dst) {
    case DType::kF32:
      return select_scaling<Run, kSrc, DType::kF32>(scaling);
    case DType::kF16:
      return select_scaling<Run, kSrc, DType::kF16>(scaling);
    case DType::kBF16:
      return select_scaling<Run, kSrc, DType::kBF16>(scaling);
  }
  return nullptr;
}

template <template <DType, DType, Scaling> class Run>
RowsKernel select_kernel(DType src, DType dst, Scaling scaling) {
  switch (src) {
    case DType::kF32:
      return select_dst<Run, DType::kF32>(dst, scaling);
    case DType::kF16:
      return select_dst<Run, DType::kF16>(dst, scaling);
    case DType::kBF16:
      return select_dst<Run, DType::kBF16>(dst, scaling);
  }
  return nullptr;
}

}  // namespace lora_refit
