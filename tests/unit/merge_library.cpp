// The CPU merge program for ctypes, so that a changed copy of its sources can be run.
#include "cpu/merge.h"

using lora_refit::BufferShape;
using lora_refit::DType;

namespace {

template <typename Row>
std::vector<Row> rows(const void* first, int64_t count) {
  const Row* begin = static_cast<const Row*>(first);
  return std::vector<Row>(begin, begin + count);
}

std::vector<BufferShape> shapes(const int32_t* dtypes, const int64_t* sizes, int64_t count) {
  std::vector<BufferShape> result;
  for (int64_t i = 0; i < count; ++i) {
    result.push_back(BufferShape{static_cast<DType>(dtypes[i]), sizes[i]});
  }
  return result;
}

}  // namespace

extern "C" void run_merge(const void* blocks, int64_t block_count, const void* segments,
                          int64_t segment_count, const int32_t* src_dtypes,
                          const int64_t* src_sizes, int64_t sources, const int32_t* dst_dtypes,
                          const int64_t* dst_sizes, int64_t destinations, int32_t modules,
                          const uint64_t* src_addresses, const uint64_t* dst_addresses,
                          uint64_t* digests, lora_refit::MergeSums* sums, int threads) {
  const lora_refit::MergeProgram program(rows<lora_refit::MergeBlock>(blocks, block_count),
                                         rows<lora_refit::MergeSegment>(segments, segment_count),
                                         shapes(src_dtypes, src_sizes, sources),
                                         shapes(dst_dtypes, dst_sizes, destinations), modules);
  program.run(src_addresses, dst_addresses, digests, sums, threads);
}
