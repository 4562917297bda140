#include "driver/copy_program.h"

#include "plan/copy_tiles.h"

namespace lora_refit::driver {
namespace {

constexpr int64_t kTilesPerBlock = cuda::kThreads / cuda::kWarpThreads;

CopyTable make_table(const std::vector<CopyBlock>& blocks, const std::vector<BufferShape>& sources,
                     const std::vector<BufferShape>& destinations) {
  check_blocks(blocks, sources, destinations);
  CopyTable table{{}, {"source", sources}, {"destination", destinations}};
  for (const Box& box : cut_into_boxes(blocks, sources, destinations, cuda::kBoxBytes)) {
    table.tiles.push_back(copy_tile(box));
    const int64_t elements = element_count(box.block);
    table.bytes_written += elements * element_bytes(box.dst_dtype);
    table.destinations.use(box.block.dst);
    if (box.block.src == kZeroFill) continue;
    table.bytes_read += elements * element_bytes(box.src_dtype);
    table.sources.use(box.block.src);
  }
  return table;
}

}  // namespace

CopyProgram::CopyProgram(const Device& device, const std::vector<CopyBlock>& blocks,
                         const std::vector<BufferShape>& sources,
                         const std::vector<BufferShape>& destinations)
    : block_count_(static_cast<int64_t>(blocks.size())),
      table_(make_table(blocks, sources, destinations)),
      kernel_(device, cuda::kCopyKernel, cuda::kThreads, 0),
      blocks_(kernel_.grid(tile_count(), kTilesPerBlock)),
      tiles_(upload(device, table_.tiles)),
      submission_(device, source_count(), destination_count(),
                  destination_count() * sizeof(uint64_t)),
      arguments_{reinterpret_cast<const cuda::CopyTile*>(tiles_.address()), tile_count(),
                 submission_.addresses().sources(), submission_.addresses().destinations(),
                 reinterpret_cast<uint64_t*>(submission_.results())} {}

void CopyProgram::run(const Addresses& addresses, uint64_t* digests, StreamHandle stream) {
  check(addresses);
  submission_.run(work(), addresses, stream, outputs(digests));
}

void CopyProgram::launch(const Addresses& addresses, StreamHandle stream) {
  check(addresses);
  submission_.launch(work(), addresses, stream);
}

void CopyProgram::collect(uint64_t* digests) { submission_.collect(outputs(digests)); }

void CopyProgram::check(const Addresses& addresses) const {
  table_.sources.check_aligned(addresses.sources);
  table_.destinations.check_aligned(addresses.destinations);
}

std::vector<Output> CopyProgram::outputs(uint64_t* digests) const {
  return {{digests, destination_count() * sizeof(uint64_t)}};
}

}  // namespace lora_refit::driver
