// A merge program on the CPU: the twin of cuda/merge.cu.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/merge_tiles.h"
#include "cpu/simd.h"
#include "plan/merge_traffic.h"

namespace lora_refit {

class MergeProgram {
 public:
  // Blocks number their modules from 0 to `modules` - 1. Throws std::invalid_argument when a block
  // or segment would leave its buffers.
  MergeProgram(const std::vector<MergeBlock>& blocks, const std::vector<MergeSegment>& segments,
               const std::vector<BufferShape>& sources,
               const std::vector<BufferShape>& destinations, int32_t modules);

  // One base address per buffer, of any alignment. Overwrites `digests`, one per destination, with
  // the digests of what was written, and `sums`, one per module; neither depends on the number of
  // threads. `threads` 0 means the default. May be called from several threads at once.
  void run(const uint64_t* src_addresses, const uint64_t* dst_addresses, uint64_t* digests,
           MergeSums* sums, int threads) const;

  int64_t block_count() const { return static_cast<int64_t>(blocks_.size()); }
  int64_t tile_count() const { return static_cast<int64_t>(tiles_.size()); }
  int64_t bytes_read() const { return traffic_.bytes_read; }
  int64_t bytes_written() const { return traffic_.bytes_written; }
  size_t source_count() const { return traffic_.sources.count(); }
  size_t destination_count() const { return traffic_.destinations.count(); }
  size_t module_count() const { return module_count_; }

 private:
  struct Run;
  static void run_tile(void* run, int64_t tile);

  std::vector<MergeBlock> blocks_;
  std::vector<MergeSegment> segments_;
  size_t module_count_;
  MergeTraffic traffic_;
  std::vector<MergeTile> tiles_;
  std::vector<DType> src_dtypes_;
  std::vector<DType> dst_dtypes_;
  DType adapter_dtype_;
  Simd simd_;
};

}  // namespace lora_refit
