// Cuts a block list into pieces of bounded size and groups the pieces into tiles of equal work.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/block_check.h"
#include "cpu/row_kernels.h"

namespace lora_refit {

// A part of one normalised block, small enough for one cache and one turn of one thread.
struct Piece {
  CopyBlock box;
  DType src_dtype;  // the destination's for a zero fill
  DType dst_dtype;
  RowsKernel kernel;  // null for a zero fill
};

struct TileTable {
  std::vector<Piece> pieces;
  std::vector<int64_t> first_piece;  // of each tile, and at the end the number of pieces

  int64_t tile_count() const { return static_cast<int64_t>(first_piece.size()) - 1; }
};

// `blocks` must have passed check_blocks. Empty blocks vanish.
TileTable make_tiles(const std::vector<CopyBlock>& blocks, const std::vector<BufferShape>& sources,
                     const std::vector<BufferShape>& destinations, int64_t tile_bytes);

// True where the inner loop is contiguous on that side.
bool src_is_contiguous(const CopyBlock& box);
bool dst_is_contiguous(const CopyBlock& box);

}  // namespace lora_refit
