#include "cpu/copy.h"

#include <algorithm>
#include <stdexcept>

#include "cpu/piece.h"
#include "cpu/shared_word.h"
#include "cpu/thread_pool.h"

namespace lora_refit {
namespace {

struct Run {
  const TileTable& table;
  const uint64_t* src_addresses;
  const uint64_t* dst_addresses;
  uint64_t* digests;
};

void run_tile(void* context, int64_t tile) {
  const Run& run = *static_cast<const Run*>(context);
  const Piece* piece = run.table.pieces.data() + run.table.first_piece[tile];
  const Piece* end = run.table.pieces.data() + run.table.first_piece[tile + 1];
  while (piece != end) {
    const int32_t dst = piece->box.dst;
    DigestSum sum;
    for (; piece != end && piece->box.dst == dst; ++piece) {
      const uint64_t src = piece->box.src == kZeroFill ? 0 : run.src_addresses[piece->box.src];
      run_piece(*piece, reinterpret_cast<const std::byte*>(src),
                reinterpret_cast<std::byte*>(run.dst_addresses[dst]), sum);
    }
    add_relaxed(&run.digests[dst], sum.value());
  }
}

}  // namespace

CopyProgram::CopyProgram(const std::vector<CopyBlock>& blocks,
                         const std::vector<BufferShape>& sources,
                         const std::vector<BufferShape>& destinations, int64_t tile_bytes)
    : block_count_(static_cast<int64_t>(blocks.size())),
      sources_("source", sources),
      destinations_("destination", destinations) {
  if (tile_bytes < 1) throw std::invalid_argument("tile_bytes must be at least 1");
  check_blocks(blocks, sources, destinations);
  table_ = make_tiles(blocks, sources, destinations, tile_bytes);
  for (const Piece& piece : table_.pieces) {
    const int64_t elements = piece.box.size[0] * piece.box.size[1] * piece.box.size[2];
    bytes_written_ += elements * element_bytes(piece.dst_dtype);
    destinations_.use(piece.box.dst);
    if (piece.box.src == kZeroFill) continue;
    bytes_read_ += elements * element_bytes(piece.src_dtype);
    sources_.use(piece.box.src);
  }
}

void CopyProgram::run(const uint64_t* src_addresses, const uint64_t* dst_addresses,
                      uint64_t* digests, int threads) const {
  sources_.check_present(src_addresses);
  destinations_.check_present(dst_addresses);
  std::fill(digests, digests + destination_count(), 0);
  Run run{table_, src_addresses, dst_addresses, digests};
  const int wanted = resolve_threads(threads, bytes_read_ + bytes_written_);
  ThreadPool::of_this_process().run(wanted, tile_count(), run_tile, &run);
}

}  // namespace lora_refit
