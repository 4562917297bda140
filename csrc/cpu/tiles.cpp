#include "cpu/tiles.h"

namespace lora_refit {
namespace {

std::vector<int64_t> group_pieces(const std::vector<Piece>& pieces, int64_t tile_bytes) {
  std::vector<int64_t> first_piece = {0};
  int64_t bytes = 0;
  for (size_t i = 0; i < pieces.size(); ++i) {
    bytes += element_count(pieces[i].box) * element_bytes(pieces[i].dst_dtype);
    if (bytes >= tile_bytes || i + 1 == pieces.size()) {
      first_piece.push_back(static_cast<int64_t>(i) + 1);
      bytes = 0;
    }
  }
  return first_piece;
}

}  // namespace

TileTable make_tiles(const std::vector<CopyBlock>& blocks, const std::vector<BufferShape>& sources,
                     const std::vector<BufferShape>& destinations, int64_t tile_bytes) {
  const Simd simd = choose_simd();
  TileTable table;
  for (const Box& box : cut_into_boxes(blocks, sources, destinations, tile_bytes)) {
    const RowsKernel kernel =
        box.block.src == kZeroFill
            ? nullptr
            : find_rows_kernel(simd, box.src_dtype, box.dst_dtype, box.scaling);
    table.pieces.push_back(Piece{box.block, box.src_dtype, box.dst_dtype, kernel});
  }
  table.first_piece = group_pieces(table.pieces, tile_bytes);
  return table;
}

}  // namespace lora_refit
