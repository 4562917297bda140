#include "cpu/loops.h"

#include <algorithm>
#include <array>

namespace lora_refit {
namespace {

struct Loop {
  int64_t size = 1;
  int64_t src_stride = 0;
  int64_t dst_stride = 0;
};

// Counts the loop the other way round so that the destination ascends.
void make_ascending(Loop& loop, CopyBlock& block) {
  if (loop.dst_stride >= 0) return;
  block.src_offset += (loop.size - 1) * loop.src_stride;
  block.dst_offset += (loop.size - 1) * loop.dst_stride;
  loop.src_stride = -loop.src_stride;
  loop.dst_stride = -loop.dst_stride;
}

bool continues(const Loop& outer, const Loop& inner) {
  return outer.src_stride == inner.size * inner.src_stride &&
         outer.dst_stride == inner.size * inner.dst_stride;
}

}  // namespace

bool is_empty(const CopyBlock& block) {
  return block.size[0] == 0 || block.size[1] == 0 || block.size[2] == 0;
}

CopyBlock normalise(const CopyBlock& block) {
  CopyBlock result = block;
  const bool zero_fill = block.src == kZeroFill;
  std::array<Loop, 3> loops;
  int count = 0;
  for (int axis = 0; axis < 3; ++axis) {
    if (block.size[axis] == 1) continue;
    // A zero fill reads nothing, so its source strides must not keep loops apart.
    const int64_t src_stride = zero_fill ? block.dst_stride[axis] : block.src_stride[axis];
    loops[count] = Loop{block.size[axis], src_stride, block.dst_stride[axis]};
    make_ascending(loops[count], result);
    ++count;
  }
  std::stable_sort(loops.begin(), loops.begin() + count,
                   [](const Loop& a, const Loop& b) { return a.dst_stride > b.dst_stride; });

  std::array<Loop, 3> merged;
  int used = 0;
  for (int i = 0; i < count; ++i) {
    if (used > 0 && continues(merged[used - 1], loops[i])) {
      merged[used - 1] =
          Loop{merged[used - 1].size * loops[i].size, loops[i].src_stride, loops[i].dst_stride};
    } else {
      merged[used++] = loops[i];
    }
  }

  for (int axis = 0; axis < 3; ++axis) {
    const int from = axis - (3 - used);
    const Loop loop = from < 0 ? Loop{} : merged[from];
    result.size[axis] = loop.size;
    result.src_stride[axis] = loop.src_stride;
    result.dst_stride[axis] = loop.dst_stride;
  }
  return result;
}

}  // namespace lora_refit
