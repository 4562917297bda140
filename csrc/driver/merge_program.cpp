#include "driver/merge_program.h"

#include "cuda/merge_shape.h"
#include "plan/merge_check.h"
#include "plan/strips.h"

namespace lora_refit::driver {
namespace {

Kernel find_kernel(const Device& device, DType adapter) {
  return Kernel(device, cuda::kMergeKernels[static_cast<int>(adapter)], cuda::kThreads,
                static_cast<size_t>(cuda::merge_shared_bytes(adapter)));
}

std::vector<int32_t> dtypes_of(const std::vector<BufferShape>& buffers) {
  std::vector<int32_t> dtypes;
  for (const BufferShape& buffer : buffers) dtypes.push_back(static_cast<int32_t>(buffer.dtype));
  return dtypes;
}

template <typename Row>
Row* table(const DeviceMemory& memory) {
  return reinterpret_cast<Row*>(memory.address());
}

}  // namespace

// Results are the sums, then the digests.
MergeProgram::MergeProgram(const Device& device, const std::vector<MergeBlock>& blocks,
                           const std::vector<MergeSegment>& segments,
                           const std::vector<BufferShape>& sources,
                           const std::vector<BufferShape>& destinations, int32_t modules)
    : block_count_(static_cast<int64_t>(blocks.size())),
      module_count_(static_cast<size_t>(modules)),
      traffic_(check_and_measure_merge(blocks, segments, sources, destinations, modules)),
      kernel_(find_kernel(device, adapter_dtype(segments, sources))),
      strips_(cut_into_strips(blocks, kernel_.resident_blocks())),
      blocks_(kernel_.grid(strip_count(), 1)),
      strips_on_device_(upload(device, strips_)),
      blocks_on_device_(upload(device, blocks)),
      segments_on_device_(upload(device, segments)),
      src_dtypes_(upload(device, dtypes_of(sources))),
      dst_dtypes_(upload(device, dtypes_of(destinations))),
      submission_(device, source_count(), destination_count(), sums_bytes() + digest_bytes()),
      arguments_(arguments()) {}

cuda::MergeArguments MergeProgram::arguments() const {
  const DeviceAddress results = submission_.results();
  return {table<const cuda::MergeStrip>(strips_on_device_),
          strip_count(),
          table<const MergeBlock>(blocks_on_device_),
          table<const MergeSegment>(segments_on_device_),
          table<const int32_t>(src_dtypes_),
          table<const int32_t>(dst_dtypes_),
          submission_.addresses().sources(),
          submission_.addresses().destinations(),
          reinterpret_cast<uint64_t*>(results + sums_bytes()),
          reinterpret_cast<MergeSums*>(results)};
}

void MergeProgram::run(const Addresses& addresses, uint64_t* digests, MergeSums* sums,
                       StreamHandle stream) {
  traffic_.sources.check_aligned(addresses.sources);
  traffic_.destinations.check_aligned(addresses.destinations);
  submission_.run({kernel_, blocks_, &arguments_}, addresses, stream,
                  {{sums, sums_bytes()}, {digests, digest_bytes()}});
}

}  // namespace lora_refit::driver
