#include "cpu/merge_pack.h"

#include <algorithm>

#include "cpu/piece.h"

namespace lora_refit {
namespace {

// The copy program's kernels do it. Only `src`, the offsets, sizes and strides of `box` are set.
void convert(const FactorSource& source, const CopyBlock& box, float* to) {
  DigestSum discarded;
  run_piece({box, source.dtype, DType::kF32, source.widen},
            reinterpret_cast<const std::byte*>(source.addresses[box.src]),
            reinterpret_cast<std::byte*>(to), discarded);
}

// Of a loop that runs once the stride is never used, and may be anything.
int64_t used_stride(int64_t size, int64_t stride) { return size > 1 ? stride : 0; }

}  // namespace

void pack_a(const FactorSource& source, const MergeSegment& segment, int64_t col, int64_t cols,
            PanelRow* panels, int64_t depth, int64_t first) {
  const int64_t whole = cols / kPanelCols;
  const int64_t col_stride = used_stride(cols, segment.a_col_stride);
  CopyBlock box{};
  box.src = segment.a;
  box.src_offset = segment.a_offset + col * segment.a_col_stride;
  box.dst_offset = first * kPanelCols;
  const int64_t src_stride[3] = {segment.a_k_stride, kPanelCols * col_stride, col_stride};
  const int64_t dst_stride[3] = {kPanelCols, depth * kPanelCols, 1};
  std::copy_n(src_stride, 3, box.src_stride);
  std::copy_n(dst_stride, 3, box.dst_stride);
  box.size[0] = segment.rank;
  box.size[1] = whole;
  box.size[2] = kPanelCols;
  convert(source, box, panels->values);

  if (cols % kPanelCols == 0) return;
  box.src_offset += whole * src_stride[1];
  box.dst_offset += whole * dst_stride[1];
  box.size[1] = 1;
  box.size[2] = cols % kPanelCols;
  convert(source, box, panels->values);
}

void pack_b(const FactorSource& source, const MergeSegment& segment, int64_t row, int64_t rows,
            float* packed, int64_t depth, int64_t first) {
  CopyBlock box{};
  box.src = segment.b;
  box.src_offset = segment.b_offset + row * segment.b_row_stride;
  box.dst_offset = first;
  box.size[0] = 1;
  box.size[1] = rows;
  box.size[2] = segment.rank;
  box.src_stride[1] = used_stride(rows, segment.b_row_stride);
  box.src_stride[2] = segment.b_k_stride;
  box.dst_stride[1] = depth;
  box.dst_stride[2] = 1;
  convert(source, box, packed);
}

}  // namespace lora_refit
