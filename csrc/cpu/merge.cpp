#include "cpu/merge.h"

#include <algorithm>

#include "cpu/merge_tile.h"
#include "cpu/thread_pool.h"
#include "plan/merge_check.h"

namespace lora_refit {
namespace {

std::vector<DType> dtypes_of(const std::vector<BufferShape>& buffers) {
  std::vector<DType> dtypes;
  for (const BufferShape& buffer : buffers) dtypes.push_back(buffer.dtype);
  return dtypes;
}

}  // namespace

struct MergeProgram::Run {
  const MergeProgram& program;
  const uint64_t* src_addresses;
  const uint64_t* dst_addresses;
  std::vector<MergeTally> tallies;  // of each tile
};

MergeProgram::MergeProgram(const std::vector<MergeBlock>& blocks,
                           const std::vector<MergeSegment>& segments,
                           const std::vector<BufferShape>& sources,
                           const std::vector<BufferShape>& destinations, int32_t modules)
    : blocks_(blocks),
      segments_(segments),
      module_count_(static_cast<size_t>(std::max(0, modules))),
      traffic_(check_and_measure_merge(blocks, segments, sources, destinations, modules)),
      tiles_(cut_into_merge_tiles(blocks, segments)),
      src_dtypes_(dtypes_of(sources)),
      dst_dtypes_(dtypes_of(destinations)),
      adapter_dtype_(adapter_dtype(segments, sources)),
      simd_(choose_simd()) {}

void MergeProgram::run_tile(void* context, int64_t number) {
  Run& run = *static_cast<Run*>(context);
  const MergeProgram& program = run.program;
  const MergeTile& tile = program.tiles_[number];
  const MergeBlock& block = program.blocks_[tile.block];
  merge_tile(
      {tile,
       block,
       program.segments_.data() + block.first_segment,
       {program.src_dtypes_[block.weight], program.dst_dtypes_[block.dst], program.adapter_dtype_},
       program.simd_,
       run.src_addresses,
       reinterpret_cast<std::byte*>(run.dst_addresses[block.dst])},
      run.tallies[number]);
}

void MergeProgram::run(const uint64_t* src_addresses, const uint64_t* dst_addresses,
                       uint64_t* digests, MergeSums* sums, int threads) const {
  traffic_.sources.check_present(src_addresses);
  traffic_.destinations.check_present(dst_addresses);
  const int wanted = resolve_threads(threads, bytes_read() + bytes_written());
  Run run{*this, src_addresses, dst_addresses, std::vector<MergeTally>(tiles_.size())};
  ThreadPool::of_this_process().run(wanted, tile_count(), run_tile, &run);

  std::fill_n(digests, destination_count(), 0);
  std::fill_n(sums, module_count(), MergeSums{});
  for (size_t i = 0; i < tiles_.size(); ++i) {
    const MergeTally& tally = run.tallies[i];
    const MergeBlock& block = blocks_[tiles_[i].block];
    const double scale = block.scale;
    MergeSums& sum = sums[block.module];
    digests[block.dst] += tally.digest.value();
    sum.residual += tally.residual;
    sum.delta += tally.products * scale * scale;
    sum.changed += tally.changed;
    sum.elements += static_cast<uint64_t>(tiles_[i].rows * tiles_[i].cols);
  }
}

}  // namespace lora_refit
