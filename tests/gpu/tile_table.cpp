// The planner's tile table of a block list, for tests that run the copy kernel without a driver.
#include <cstdint>
#include <vector>

#include "plan/copy_tiles.h"

using namespace lora_refit;

namespace {

std::vector<BufferShape> shapes(const int32_t* dtypes, const int64_t* sizes, int64_t count) {
  std::vector<BufferShape> result;
  for (int64_t i = 0; i < count; ++i) result.push_back({static_cast<DType>(dtypes[i]), sizes[i]});
  return result;
}

}  // namespace

// Returns how many tiles there are, and writes as many as `capacity` allows.
extern "C" int64_t tile_table(const CopyBlock* blocks, int64_t block_count,
                              const int32_t* src_dtypes, const int64_t* src_sizes,
                              int64_t src_count, const int32_t* dst_dtypes,
                              const int64_t* dst_sizes, int64_t dst_count, cuda::CopyTile* tiles,
                              int64_t capacity) {
  const auto boxes =
      cut_into_boxes({blocks, blocks + block_count}, shapes(src_dtypes, src_sizes, src_count),
                     shapes(dst_dtypes, dst_sizes, dst_count), cuda::kBoxBytes);
  const auto count = static_cast<int64_t>(boxes.size());
  for (int64_t i = 0; i < count && i < capacity; ++i) {
    tiles[i] = copy_tile(boxes[i]);
  }
  return count;
}
