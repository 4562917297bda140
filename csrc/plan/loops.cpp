#include "plan/loops.h"

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

struct LoopNest {
  std::array<Loop, 3> loops;
  int count = 0;
};

LoopNest ascending_loops(CopyBlock& block) {
  LoopNest nest;
  for (int axis = 0; axis < 3; ++axis) {
    if (block.size[axis] == 1) continue;
    Loop& loop = nest.loops[nest.count++];
    loop = Loop{block.size[axis], block.src_stride[axis], block.dst_stride[axis]};
    make_ascending(loop, block);
  }
  std::stable_sort(nest.loops.begin(), nest.loops.begin() + nest.count,
                   [](const Loop& a, const Loop& b) { return a.dst_stride > b.dst_stride; });
  return nest;
}

LoopNest merge_loops(const LoopNest& nest) {
  LoopNest merged;
  for (int i = 0; i < nest.count; ++i) {
    const Loop& loop = nest.loops[i];
    if (merged.count > 0 && continues(merged.loops[merged.count - 1], loop)) {
      Loop& outer = merged.loops[merged.count - 1];
      outer = Loop{outer.size * loop.size, loop.src_stride, loop.dst_stride};
    } else {
      merged.loops[merged.count++] = loop;
    }
  }
  return merged;
}

}  // namespace

bool is_empty(const CopyBlock& block) {
  return block.size[0] == 0 || block.size[1] == 0 || block.size[2] == 0;
}

CopyBlock normalise(const CopyBlock& block) {
  CopyBlock result = block;
  if (block.src == kZeroFill) {  // reads nothing: its source must not keep loops apart
    result.src_offset = block.dst_offset;
    std::copy(block.dst_stride, block.dst_stride + 3, result.src_stride);
  }
  const LoopNest nest = merge_loops(ascending_loops(result));
  for (int axis = 0; axis < 3; ++axis) {
    const int from = axis - (3 - nest.count);
    const Loop loop = from < 0 ? Loop{} : nest.loops[from];
    result.size[axis] = loop.size;
    result.src_stride[axis] = loop.src_stride;
    result.dst_stride[axis] = loop.dst_stride;
  }
  return result;
}

}  // namespace lora_refit
