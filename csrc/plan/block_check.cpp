#include "plan/block_check.h"

#include <string>

#include "plan/checks.h"

namespace lora_refit {
namespace {

std::vector<Loop> loops_of(const int64_t (&size)[3], const int64_t (&stride)[3]) {
  return {{size[0], stride[0]}, {size[1], stride[1]}, {size[2], stride[2]}};
}

void check_block(const Item& item, const CopyBlock& block, const std::vector<BufferShape>& sources,
                 const std::vector<BufferShape>& destinations) {
  const bool zero_fill = block.src == kZeroFill;
  if (!zero_fill) check_index(item, "source", block.src, sources.size());
  check_index(item, "destination", block.dst, destinations.size());
  if ((block.flags & ~kScaleOnce) != 0) {
    refuse(item, "flags " + std::to_string(block.flags) + " are not known; only SCALE_ONCE is");
  }
  check_finite_scale(item, block.scale);

  bool empty = false;
  for (int64_t size : block.size) {
    check_not_negative(item, "size", size);
    empty |= size == 0;
  }
  if (empty) return;

  for (int axis = 0; axis < 3; ++axis) {
    if (block.size[axis] > 1 && block.dst_stride[axis] == 0) {
      refuse(item, "destination stride 0 writes the same elements more than once");
    }
  }
  check_extent(item, "destination", block.dst, block.dst_offset,
               loops_of(block.size, block.dst_stride), destinations);
  if (!zero_fill) {
    check_extent(item, "source", block.src, block.src_offset,
                 loops_of(block.size, block.src_stride), sources);
  }
}

}  // namespace

void check_blocks(const std::vector<CopyBlock>& blocks, const std::vector<BufferShape>& sources,
                  const std::vector<BufferShape>& destinations) {
  check_buffers("source", sources);
  check_buffers("destination", destinations);
  for (size_t i = 0; i < blocks.size(); ++i) {
    check_block({"block", i}, blocks[i], sources, destinations);
  }
}

}  // namespace lora_refit
