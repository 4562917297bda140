#include "kernels.h"

#include <cstring>
#include <initializer_list>

#include "cuda/kernels.h"

extern "C" {
void lora_refit_copy(lora_refit::cuda::CopyArguments);
void lora_refit_digest(lora_refit::cuda::DigestArguments);
void lora_refit_merge_f32(lora_refit::cuda::MergeArguments);
void lora_refit_merge_f16(lora_refit::cuda::MergeArguments);
void lora_refit_merge_bf16(lora_refit::cuda::MergeArguments);
}

namespace fakecuda {
namespace {

namespace cuda = lora_refit::cuda;
using lora_refit::CopyBlock;
using lora_refit::DType;
using lora_refit::element_bytes;

template <typename Row>
void touch_table(const Touch& touch, const Row* rows, int64_t count) {
  touch(reinterpret_cast<uint64_t>(rows), count * static_cast<int64_t>(sizeof(Row)));
}

// The addresses between the lowest and the highest element of a box.
void touch_box(const Touch& touch, uint64_t base, int64_t offset, const int64_t (&size)[3],
               const int64_t (&stride)[3], int64_t bytes) {
  int64_t lowest = offset;
  int64_t highest = offset;
  for (int axis = 0; axis < 3; ++axis) {
    const int64_t reach = (size[axis] - 1) * stride[axis];
    (reach < 0 ? lowest : highest) += reach;
  }
  touch(base + static_cast<uint64_t>(lowest * bytes), (highest - lowest + 1) * bytes);
}

int64_t src_bytes(const cuda::CopyTile& tile) {
  const int pairs = lora_refit::kDTypeCount * lora_refit::kScalingCount;
  return element_bytes(static_cast<DType>(tile.variant / pairs));
}

int64_t dst_bytes(const cuda::CopyTile& tile) {
  if (tile.variant == cuda::kZeroFillVariant2) return 2;
  if (tile.variant == cuda::kZeroFillVariant4) return 4;
  return element_bytes(
      static_cast<DType>(tile.variant / lora_refit::kScalingCount % lora_refit::kDTypeCount));
}

void visit_copy(const cuda::CopyArguments& arguments, const Touch& touch) {
  touch_table(touch, arguments.tiles, arguments.tile_count);
  for (int64_t i = 0; i < arguments.tile_count; ++i) {
    const cuda::CopyTile& tile = arguments.tiles[i];
    const CopyBlock& box = tile.box;
    touch_table(touch, arguments.dst_addresses + box.dst, 1);
    touch_table(touch, arguments.digests + box.dst, 1);
    touch_box(touch, arguments.dst_addresses[box.dst], box.dst_offset, box.size, box.dst_stride,
              dst_bytes(tile));
    if (box.src == lora_refit::kZeroFill) continue;
    touch_table(touch, arguments.src_addresses + box.src, 1);
    touch_box(touch, arguments.src_addresses[box.src], box.src_offset, box.size, box.src_stride,
              src_bytes(tile));
  }
}

void visit_digest(const cuda::DigestArguments& arguments, const Touch& touch) {
  touch_table(touch, arguments.buffers, arguments.buffer_count);
  touch_table(touch, arguments.digests, arguments.buffer_count);
  for (int64_t i = 0; i < arguments.buffer_count; ++i) {
    touch(arguments.buffers[i].address, arguments.buffers[i].bytes);
  }
}

// A strided rectangle of one source or destination.
void touch_matrix(const Touch& touch, const uint64_t* addresses, const int32_t* dtypes,
                  int32_t buffer, int64_t offset, const int64_t (&size)[3],
                  const int64_t (&stride)[3]) {
  touch_table(touch, addresses + buffer, 1);
  touch_table(touch, dtypes + buffer, 1);
  touch_box(touch, addresses[buffer], offset, size, stride,
            element_bytes(static_cast<DType>(dtypes[buffer])));
}

void visit_merge(const cuda::MergeArguments& arguments, const Touch& touch) {
  touch_table(touch, arguments.strips, arguments.strip_count);
  for (int64_t i = 0; i < arguments.strip_count; ++i) {
    const lora_refit::MergeBlock* block = arguments.blocks + arguments.strips[i].block;
    touch_table(touch, block, 1);
    touch_table(touch, arguments.sums + block->module, 1);
    touch_table(touch, arguments.digests + block->dst, 1);
    touch_matrix(touch, arguments.src_addresses, arguments.src_dtypes, block->weight,
                 block->weight_offset, {1, block->rows, block->cols},
                 {0, block->weight_row_stride, 1});
    touch_matrix(touch, arguments.dst_addresses, arguments.dst_dtypes, block->dst,
                 block->dst_offset, {1, block->rows, block->cols}, {0, block->dst_row_stride, 1});
    for (int32_t s = 0; s < block->segment_count; ++s) {
      const lora_refit::MergeSegment* segment = arguments.segments + block->first_segment + s;
      touch_table(touch, segment, 1);
      if (segment->rank == 0) continue;
      touch_matrix(touch, arguments.src_addresses, arguments.src_dtypes, segment->b,
                   segment->b_offset, {1, block->rows, segment->rank},
                   {0, segment->b_row_stride, segment->b_k_stride});
      touch_matrix(touch, arguments.src_addresses, arguments.src_dtypes, segment->a,
                   segment->a_offset, {1, segment->rank, block->cols},
                   {0, segment->a_k_stride, segment->a_col_stride});
    }
  }
}

template <typename Arguments, void (*kEntry)(Arguments),
          void (*kVisit)(const Arguments&, const Touch&)>
Kernel kernel(const char* name) {
  return {name, sizeof(Arguments),
          [](const void* arguments) { kEntry(*static_cast<const Arguments*>(arguments)); },
          [](const void* arguments, const Touch& touch) {
            kVisit(*static_cast<const Arguments*>(arguments), touch);
          }};
}

}  // namespace

const Kernel* find_kernel(const std::string& name) {
  using cuda::MergeArguments;
  static const std::initializer_list<Kernel> kernels = {
      kernel<cuda::CopyArguments, lora_refit_copy, visit_copy>("lora_refit_copy"),
      kernel<cuda::DigestArguments, lora_refit_digest, visit_digest>("lora_refit_digest"),
      kernel<MergeArguments, lora_refit_merge_f32, visit_merge>("lora_refit_merge_f32"),
      kernel<MergeArguments, lora_refit_merge_f16, visit_merge>("lora_refit_merge_f16"),
      kernel<MergeArguments, lora_refit_merge_bf16, visit_merge>("lora_refit_merge_bf16"),
  };
  for (const Kernel& candidate : kernels) {
    if (candidate.name == name) return &candidate;
  }
  return nullptr;
}

}  // namespace fakecuda
