#include "plan/boxes.h"

#include <algorithm>

#include "plan/loops.h"

namespace lora_refit {
namespace {

// With a strided source each element of a row touches its own cache line, and the next row touches
// the same lines again: this many of them stay in the first-level cache.
constexpr int64_t kStridedColumns = 256;

CopyBlock sub_block(const CopyBlock& block, const int64_t (&first)[3], const int64_t (&size)[3]) {
  CopyBlock part = block;
  for (int axis = 0; axis < 3; ++axis) {
    part.src_offset += first[axis] * block.src_stride[axis];
    part.dst_offset += first[axis] * block.dst_stride[axis];
    part.size[axis] = size[axis];
  }
  return part;
}

Scaling scaling_of(const CopyBlock& block) {
  if (block.scale == 1.0f) return Scaling::kNone;
  return (block.flags & kScaleOnce) != 0 ? Scaling::kBeforeCast : Scaling::kAfterCast;
}

// The largest part of about `elements` elements that is cut along as few loops as possible.
void choose_steps(const CopyBlock& block, int64_t elements, int64_t (&step)[3]) {
  const bool strided = !src_is_contiguous(block) && block.src != kZeroFill;
  step[2] = std::min(block.size[2], strided ? std::min(elements, kStridedColumns) : elements);
  step[1] = std::min(block.size[1], std::max<int64_t>(1, elements / step[2]));
  const bool whole_rows = step[1] == block.size[1] && step[2] == block.size[2];
  const int64_t batches = whole_rows ? elements / (step[1] * step[2]) : 1;
  step[0] = std::min(block.size[0], std::max<int64_t>(1, batches));
}

void append_boxes(const Box& whole, int64_t box_bytes, std::vector<Box>& boxes) {
  const CopyBlock& block = whole.block;
  int64_t step[3];
  choose_steps(block, std::max<int64_t>(1, box_bytes / element_bytes(whole.dst_dtype)), step);
  for (int64_t batch = 0; batch < block.size[0]; batch += step[0]) {
    for (int64_t col = 0; col < block.size[2]; col += step[2]) {
      for (int64_t row = 0; row < block.size[1]; row += step[1]) {
        Box part = whole;
        part.block = sub_block(
            block, {batch, row, col},
            {std::min(step[0], block.size[0] - batch), std::min(step[1], block.size[1] - row),
             std::min(step[2], block.size[2] - col)});
        boxes.push_back(part);
      }
    }
  }
}

}  // namespace

bool src_is_contiguous(const CopyBlock& block) {
  return block.size[2] == 1 || block.src_stride[2] == 1;
}

bool dst_is_contiguous(const CopyBlock& block) {
  return block.size[2] == 1 || block.dst_stride[2] == 1;
}

int64_t element_count(const CopyBlock& block) {
  return block.size[0] * block.size[1] * block.size[2];
}

std::vector<Box> cut_into_boxes(const std::vector<CopyBlock>& blocks,
                                const std::vector<BufferShape>& sources,
                                const std::vector<BufferShape>& destinations, int64_t box_bytes) {
  std::vector<Box> boxes;
  for (const CopyBlock& block : blocks) {
    if (is_empty(block)) continue;
    const DType dst = destinations[block.dst].dtype;
    const DType src = block.src == kZeroFill ? dst : sources[block.src].dtype;
    append_boxes(Box{normalise(block), src, dst, scaling_of(block)}, box_bytes, boxes);
  }
  return boxes;
}

}  // namespace lora_refit
