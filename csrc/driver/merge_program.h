// A merge program on a GPU: the host's side of cuda/merge.cu.
#pragma once

#include <cstdint>
#include <vector>

#include "cuda/kernels.h"
#include "driver/submission.h"
#include "plan/merge_traffic.h"

namespace lora_refit::driver {

class MergeProgram {
 public:
  // Blocks number their modules from 0 to `modules` - 1. Throws std::invalid_argument when a block
  // or segment would leave its buffers.
  MergeProgram(const Device& device, const std::vector<MergeBlock>& blocks,
               const std::vector<MergeSegment>& segments, const std::vector<BufferShape>& sources,
               const std::vector<BufferShape>& destinations, int32_t modules);

  // Merges everything once and waits. Overwrites `digests`, one per destination, with the digests
  // of what was written, and `sums`, one per module.
  void run(const Addresses& addresses, uint64_t* digests, MergeSums* sums, StreamHandle stream);

  int64_t block_count() const { return block_count_; }
  int64_t strip_count() const { return static_cast<int64_t>(strips_.size()); }
  int64_t bytes_read() const { return traffic_.bytes_read; }
  int64_t bytes_written() const { return traffic_.bytes_written; }
  size_t source_count() const { return traffic_.sources.count(); }
  size_t destination_count() const { return traffic_.destinations.count(); }
  size_t module_count() const { return module_count_; }

 private:
  cuda::MergeArguments arguments() const;
  size_t sums_bytes() const { return module_count_ * sizeof(MergeSums); }
  size_t digest_bytes() const { return destination_count() * sizeof(uint64_t); }

  int64_t block_count_;
  size_t module_count_;
  MergeTraffic traffic_;
  Kernel kernel_;
  std::vector<cuda::MergeStrip> strips_;
  unsigned blocks_;
  DeviceMemory strips_on_device_;
  DeviceMemory blocks_on_device_;
  DeviceMemory segments_on_device_;
  DeviceMemory src_dtypes_;
  DeviceMemory dst_dtypes_;
  Submission submission_;
  cuda::MergeArguments arguments_;
};

}  // namespace lora_refit::driver
