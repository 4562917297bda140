// The merge planner for Python: see merge_plan.py.
#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "plan/merge_check.h"
#include "plan/strips.h"

using namespace lora_refit;

namespace {

template <class T>
std::vector<T> copy(const void* items, int64_t count) {
  const T* first = static_cast<const T*>(items);
  return std::vector<T>(first, first + count);
}

std::vector<BufferShape> shapes(const int32_t* dtypes, const int64_t* sizes, int64_t count) {
  std::vector<BufferShape> result;
  for (int64_t i = 0; i < count; ++i) result.push_back({static_cast<DType>(dtypes[i]), sizes[i]});
  return result;
}

}  // namespace

// Writes the error, cut to `size` bytes with a zero at the end, or an empty string.
extern "C" void check_merge_program(const void* blocks, int64_t block_count, const void* segments,
                                    int64_t segment_count, const int32_t* src_dtypes,
                                    const int64_t* src_sizes, int64_t src_count,
                                    const int32_t* dst_dtypes, const int64_t* dst_sizes,
                                    int64_t dst_count, int32_t modules, char* error, size_t size) {
  error[0] = 0;
  try {
    check_merge(copy<MergeBlock>(blocks, block_count), copy<MergeSegment>(segments, segment_count),
                shapes(src_dtypes, src_sizes, src_count), shapes(dst_dtypes, dst_sizes, dst_count),
                modules);
  } catch (const std::invalid_argument& refused) {
    std::strncpy(error, refused.what(), size - 1);
    error[size - 1] = 0;
  }
}

// Writes up to `room` strips and returns how many there are.
extern "C" int64_t cut_merge_strips(const void* blocks, int64_t block_count, int64_t thread_blocks,
                                    cuda::MergeStrip* strips, int64_t room) {
  const auto cut = cut_into_strips(copy<MergeBlock>(blocks, block_count), thread_blocks);
  const int64_t count = static_cast<int64_t>(cut.size());
  std::copy_n(cut.begin(), std::min(room, count), strips);
  return count;
}
