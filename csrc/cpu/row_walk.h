// What the portable and the AVX2 row kernels share: the walk over rows and digest chunks, and the
// table of instantiations.
#pragma once

#include <algorithm>

#include "cpu/row_kernels.h"

namespace lora_refit {

template <DType kDType>
inline constexpr int64_t kChunkElements = kChunkBytes / element_bytes(kDType);

// Cuts each row where the digest's chunk changes. Run::move(src, dst, first, count, scale) moves
// `count` elements, the first of which is element `first` of a chunk, and returns their weighted
// sum.
template <class Run>
void walk_rows(const RowsJob& job, DigestSum& sum) {
  constexpr uint64_t kChunk = kChunkElements<Run::kDst>;
  const std::byte* src_row = job.src;
  std::byte* dst_row = job.dst;
  int64_t position = job.dst_position;
  for (int64_t row = 0; row < job.rows; ++row) {
    for (int64_t done = 0; done < job.cols;) {
      const uint64_t element = static_cast<uint64_t>(position + done);
      const uint64_t chunk = element / kChunk;
      const int64_t first = static_cast<int64_t>(element % kChunk);
      const int64_t count = std::min(job.cols - done, static_cast<int64_t>(kChunk) - first);
      sum.add(chunk, Run::move(src_row + done * element_bytes(Run::kSrc),
                               dst_row + done * element_bytes(Run::kDst), first, count, job.scale));
      done += count;
    }
    src_row += job.src_row_bytes;
    dst_row += job.dst_row_bytes;
    position += job.dst_row_elements;
  }
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
