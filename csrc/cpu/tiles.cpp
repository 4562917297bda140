#include "cpu/tiles.h"

#include <algorithm>

#include "cpu/loops.h"

namespace lora_refit {
namespace {

// With a strided source each element of a row touches its own cache line, and the next row touches
// the same lines again: this many of them stay in the first-level cache.
constexpr int64_t kStridedColumns = 256;

int64_t box_elements(const CopyBlock& box) { return box.size[0] * box.size[1] * box.size[2]; }

CopyBlock sub_box(const CopyBlock& box, const int64_t (&first)[3], const int64_t (&size)[3]) {
  CopyBlock part = box;
  for (int axis = 0; axis < 3; ++axis) {
    part.src_offset += first[axis] * box.src_stride[axis];
    part.dst_offset += first[axis] * box.dst_stride[axis];
    part.size[axis] = size[axis];
  }
  return part;
}

Scaling scaling_of(const CopyBlock& block) {
  if (block.scale == 1.0f) return Scaling::kNone;
  return (block.flags & kScaleOnce) != 0 ? Scaling::kBeforeCast : Scaling::kAfterCast;
}

// The largest sub-box of about `elements` elements that is cut along as few loops as possible.
void choose_steps(const CopyBlock& box, int64_t elements, int64_t (&step)[3]) {
  const bool strided = !src_is_contiguous(box) && box.src != kZeroFill;
  step[2] = std::min(box.size[2], strided ? std::min(elements, kStridedColumns) : elements);
  step[1] = std::min(box.size[1], std::max<int64_t>(1, elements / step[2]));
  const bool whole_rows = step[1] == box.size[1] && step[2] == box.size[2];
  const int64_t batches = whole_rows ? elements / (step[1] * step[2]) : 1;
  step[0] = std::min(box.size[0], std::max<int64_t>(1, batches));
}

void append_pieces(const Piece& whole, int64_t tile_bytes, std::vector<Piece>& pieces) {
  const CopyBlock& box = whole.box;
  int64_t step[3];
  choose_steps(box, std::max<int64_t>(1, tile_bytes / element_bytes(whole.dst_dtype)), step);
  for (int64_t batch = 0; batch < box.size[0]; batch += step[0]) {
    for (int64_t col = 0; col < box.size[2]; col += step[2]) {
      for (int64_t row = 0; row < box.size[1]; row += step[1]) {
        Piece piece = whole;
        piece.box =
            sub_box(box, {batch, row, col},
                    {std::min(step[0], box.size[0] - batch), std::min(step[1], box.size[1] - row),
                     std::min(step[2], box.size[2] - col)});
        pieces.push_back(piece);
      }
    }
  }
}

std::vector<int64_t> group_pieces(const std::vector<Piece>& pieces, int64_t tile_bytes) {
  std::vector<int64_t> first_piece = {0};
  int64_t bytes = 0;
  for (size_t i = 0; i < pieces.size(); ++i) {
    bytes += box_elements(pieces[i].box) * element_bytes(pieces[i].dst_dtype);
    if (bytes >= tile_bytes || i + 1 == pieces.size()) {
      first_piece.push_back(static_cast<int64_t>(i) + 1);
      bytes = 0;
    }
  }
  return first_piece;
}

}  // namespace

bool src_is_contiguous(const CopyBlock& box) { return box.size[2] == 1 || box.src_stride[2] == 1; }

bool dst_is_contiguous(const CopyBlock& box) { return box.size[2] == 1 || box.dst_stride[2] == 1; }

TileTable make_tiles(const std::vector<CopyBlock>& blocks, const std::vector<BufferShape>& sources,
                     const std::vector<BufferShape>& destinations, int64_t tile_bytes) {
  const Simd simd = choose_simd();
  TileTable table;
  for (const CopyBlock& block : blocks) {
    if (is_empty(block)) continue;
    const bool zero_fill = block.src == kZeroFill;
    const DType dst = destinations[block.dst].dtype;
    const DType src = zero_fill ? dst : sources[block.src].dtype;
    const RowsKernel kernel =
        zero_fill ? nullptr : find_rows_kernel(simd, src, dst, scaling_of(block));
    append_pieces(Piece{normalise(block), src, dst, kernel}, tile_bytes, table.pieces);
  }
  table.first_piece = group_pieces(table.pieces, tile_bytes);
  return table;
}

}  // namespace lora_refit
