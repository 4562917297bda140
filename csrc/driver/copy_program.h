// A copy program on a GPU: the host's side of cuda/copy.cu.
#pragma once

#include <cstdint>
#include <vector>

#include "cuda/kernels.h"
#include "driver/submission.h"
#include "plan/used_buffers.h"

namespace lora_refit::driver {

// The block list as the kernel reads it, and what one run of it moves.
struct CopyTable {
  std::vector<cuda::CopyTile> tiles;
  UsedBuffers sources;
  UsedBuffers destinations;
  int64_t bytes_read = 0;
  int64_t bytes_written = 0;
};

class CopyProgram {
 public:
  // Throws std::invalid_argument when a block would leave its buffers.
  CopyProgram(const Device& device, const std::vector<CopyBlock>& blocks,
              const std::vector<BufferShape>& sources,
              const std::vector<BufferShape>& destinations);

  // Moves everything once and waits. Overwrites `digests`, one per destination, with the digests of
  // what was written.
  void run(const Addresses& addresses, uint64_t* digests, StreamHandle stream);

  // The same without waiting, and the wait. See Submission.
  void launch(const Addresses& addresses, StreamHandle stream);
  void collect(uint64_t* digests);

  int64_t block_count() const { return block_count_; }
  int64_t tile_count() const { return static_cast<int64_t>(table_.tiles.size()); }
  int64_t bytes_read() const { return table_.bytes_read; }
  int64_t bytes_written() const { return table_.bytes_written; }
  size_t source_count() const { return table_.sources.count(); }
  size_t destination_count() const { return table_.destinations.count(); }

 private:
  Work work() const { return {kernel_, blocks_, &arguments_}; }
  void check(const Addresses& addresses) const;
  std::vector<Output> outputs(uint64_t* digests) const;

  int64_t block_count_;
  CopyTable table_;
  Kernel kernel_;
  unsigned blocks_;
  DeviceMemory tiles_;
  Submission submission_;
  cuda::CopyArguments arguments_;
};

}  // namespace lora_refit::driver
