// A copy program: a block list checked, normalised and tiled once, and run any number of times.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/tiles.h"
#include "plan/used_buffers.h"

namespace lora_refit {

inline constexpr int64_t kDefaultTileBytes = 128 * 1024;

class CopyProgram {
 public:
  // Throws std::invalid_argument when a block would leave its buffers.
  CopyProgram(const std::vector<CopyBlock>& blocks, const std::vector<BufferShape>& sources,
              const std::vector<BufferShape>& destinations, int64_t tile_bytes);

  // One base address per buffer, of any alignment. Overwrites `digests`, one per destination, with
  // the digests of what was written. `threads` 0 means the default. May be called from several
  // threads at once. Allocates nothing once the pool's threads exist.
  void run(const uint64_t* src_addresses, const uint64_t* dst_addresses, uint64_t* digests,
           int threads) const;

  int64_t block_count() const { return block_count_; }
  int64_t tile_count() const { return table_.tile_count(); }
  int64_t bytes_read() const { return bytes_read_; }
  int64_t bytes_written() const { return bytes_written_; }
  size_t source_count() const { return sources_.count(); }
  size_t destination_count() const { return destinations_.count(); }

 private:
  int64_t block_count_;
  TileTable table_;
  int64_t bytes_read_ = 0;
  int64_t bytes_written_ = 0;
  UsedBuffers sources_;
  UsedBuffers destinations_;
};

}  // namespace lora_refit
