#include "cpu/copy.h"

#include <algorithm>
#include <stdexcept>
#include <string>

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

void refuse_missing(const char* side, const std::vector<bool>& used, const uint64_t* addresses) {
  for (size_t i = 0; i < used.size(); ++i) {
    if (used[i] && addresses[i] == 0) {
      throw std::invalid_argument(std::string(side) + " buffer " + std::to_string(i) +
                                  " has address 0, but blocks use it");
    }
  }
}

}  // namespace

CopyProgram::CopyProgram(const std::vector<CopyBlock>& blocks,
                         const std::vector<BufferShape>& sources,
                         const std::vector<BufferShape>& destinations, int64_t tile_bytes)
    : block_count_(static_cast<int64_t>(blocks.size())),
      source_used_(sources.size()),
      destination_used_(destinations.size()) {
  if (tile_bytes < 1) throw std::invalid_argument("tile_bytes must be at least 1");
  check_blocks(blocks, sources, destinations);
  table_ = make_tiles(blocks, sources, destinations, tile_bytes);
  for (const Piece& piece : table_.pieces) {
    const int64_t elements = piece.box.size[0] * piece.box.size[1] * piece.box.size[2];
    bytes_written_ += elements * element_bytes(piece.dst_dtype);
    destination_used_[piece.box.dst] = true;
    if (piece.box.src == kZeroFill) continue;
    bytes_read_ += elements * element_bytes(piece.src_dtype);
    source_used_[piece.box.src] = true;
  }
}

void CopyProgram::run(const uint64_t* src_addresses, const uint64_t* dst_addresses,
                      uint64_t* digests, int threads) const {
  refuse_missing("source", source_used_, src_addresses);
  refuse_missing("destination", destination_used_, dst_addresses);
  std::fill(digests, digests + destination_count(), 0);
  Run run{table_, src_addresses, dst_addresses, digests};
  const int wanted = resolve_threads(threads, bytes_read_ + bytes_written_);
  ThreadPool::of_this_process().run(wanted, tile_count(), run_tile, &run);
}

}  // namespace lora_refit
