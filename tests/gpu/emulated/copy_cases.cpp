#include "emulated/copy_cases.h"

#include <algorithm>
#include <utility>

namespace lora_refit::testing {
namespace {

// Lays out the destination of `block` in a region of its own, from element `first` on or soon
// after; returns the region's end. Two regions may be neighbours in one word.
int64_t lay_out_destination(Random& random, CopyBlock& block, int64_t first) {
  const int64_t alignment = random.one_of({1, 1, 2, 8});
  first = (first + alignment - 1) / alignment * alignment;
  int axes[3] = {2, 1, 0};
  if (random.from(0, 2) == 0) std::swap(axes[0], axes[random.from(0, 2)]);
  const int64_t gap = random.one_of({0, 0, 1, 8});
  int64_t step = 1;
  for (int axis : axes) {
    block.dst_stride[axis] = step;
    step = step * std::max<int64_t>(1, block.size[axis]) + gap;
  }
  block.dst_offset = first;
  if (random.from(0, 3) == 0 && block.size[1] > 0) {  // rows written upwards
    block.dst_offset += (block.size[1] - 1) * block.dst_stride[1];
    block.dst_stride[1] = -block.dst_stride[1];
  }
  return first + step;
}

// Gives `block` source strides of any sign; returns the number of elements they need.
int64_t lay_out_source(Random& random, CopyBlock& block) {
  const bool like_destination = random.from(0, 2) != 0;
  int64_t lowest = 0;
  int64_t highest = 0;
  for (int axis = 0; axis < 3; ++axis) {
    const int64_t stride =
        like_destination ? block.dst_stride[axis] : random.one_of({-17, -1, 0, 1, 1, 2, 40});
    block.src_stride[axis] = stride;
    const int64_t reach = std::max<int64_t>(0, block.size[axis] - 1) * stride;
    (reach < 0 ? lowest : highest) += reach;
  }
  block.src_offset = random.one_of({0, 0, 1, 2, 8}) - lowest;
  return block.src_offset + highest + 1;
}

void choose_sizes(Random& random, CopyBlock& block) {
  for (int64_t& size : block.size) size = random.one_of({1, 1, 2, 3, 5, 8});
  block.size[2] = random.one_of({1, 2, 4, 8, 15, 16, 24, 33, 64, 333});
  if (random.from(0, 19) == 0) block.size[random.from(0, 2)] = 0;
  if (random.from(0, 19) == 0) block.size[2] = random.from(4000, 9000);
}

struct Variant {
  int32_t src;
  int32_t dst;
  Scaling scaling;
};

void append_block(Random& random, const Variant& variant, CopyCase& result) {
  CopyBlock block{};
  block.src = variant.src;
  block.dst = variant.dst;
  block.scale = variant.scaling == Scaling::kNone ? 1.0f : random.one_of({2.0f, -0.3f, 1e-8f});
  block.flags = variant.scaling == Scaling::kBeforeCast ? kScaleOnce : 0;
  choose_sizes(random, block);
  int64_t& dst_elements = result.destinations[block.dst].elements;
  dst_elements = lay_out_destination(random, block, dst_elements);
  const int64_t src_elements = lay_out_source(random, block);
  if (block.src != kZeroFill) {
    int64_t& needed = result.sources[block.src].elements;
    needed = std::max(needed, src_elements);
  }
  result.blocks.push_back(block);
}

std::vector<Variant> all_variants() {
  std::vector<Variant> variants;
  for (int dst = 0; dst < kDTypeCount; ++dst) {
    for (int src = kZeroFill; src < kDTypeCount; ++src) {
      for (int scaling = 0; scaling < kScalingCount; ++scaling) {
        variants.push_back({src, dst, static_cast<Scaling>(scaling)});
      }
    }
  }
  return variants;
}

}  // namespace

CopyCase random_copy_case(Random& random) {
  CopyCase result;
  for (int dtype = 0; dtype < kDTypeCount; ++dtype) {
    result.sources.push_back({static_cast<DType>(dtype), 0});
    result.destinations.push_back({static_cast<DType>(dtype), 0});
  }
  const std::vector<Variant> variants = all_variants();
  if (random.from(0, 4) == 0) {
    for (const Variant& variant : variants) append_block(random, variant, result);
    return result;
  }
  const int64_t count = random.one_of({0, 1, 3, 3, 8, 8, 200});
  for (int64_t i = 0; i < count; ++i) {
    const int64_t variant = random.from(0, static_cast<int64_t>(variants.size()) - 1);
    append_block(random, variants[variant], result);
  }
  return result;
}

}  // namespace lora_refit::testing
