// Groups the boxes of a block list into tiles of equal work.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/row_kernels.h"
#include "plan/boxes.h"

namespace lora_refit {

// A box and the row kernel that moves it.
struct Piece {
  CopyBlock box;
  DType src_dtype;
  DType dst_dtype;
  RowsKernel kernel;  // null for a zero fill
};

struct TileTable {
  std::vector<Piece> pieces;
  std::vector<int64_t> first_piece;  // of each tile, and at the end the number of pieces

  int64_t tile_count() const { return static_cast<int64_t>(first_piece.size()) - 1; }
};

// `blocks` must have passed check_blocks.
TileTable make_tiles(const std::vector<CopyBlock>& blocks, const std::vector<BufferShape>& sources,
                     const std::vector<BufferShape>& destinations, int64_t tile_bytes);

}  // namespace lora_refit
