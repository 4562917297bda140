#include "plan/block_check.h"

#include <cmath>
#include <stdexcept>
#include <string>

namespace lora_refit {
namespace {

// Products of 64-bit sizes and strides do not fit 64 bits; three of them and an offset fit 128.
__extension__ typedef __int128 Wide;

[[noreturn]] void refuse(size_t block, const std::string& reason) {
  throw std::invalid_argument("block " + std::to_string(block) + ": " + reason);
}

std::string text(Wide value) {
  constexpr Wide kMost = INT64_MAX;
  if (value > kMost) return "more than 2^63";
  if (value < -kMost) return "less than -2^63";
  return std::to_string(static_cast<int64_t>(value));
}

void check_extent(size_t number, const char* side, int32_t index, int64_t offset,
                  const int64_t (&size)[3], const int64_t (&stride)[3],
                  const std::vector<BufferShape>& buffers) {
  Wide lowest = offset;
  Wide highest = offset;
  for (int axis = 0; axis < 3; ++axis) {
    const Wide reach = Wide{size[axis] - 1} * stride[axis];
    (reach < 0 ? lowest : highest) += reach;
  }
  const int64_t elements = buffers[index].elements;
  if (lowest < 0 || highest >= elements) {
    refuse(number, std::string(side) + " elements " + text(lowest) + " to " + text(highest) +
                       " lie outside " + side + " buffer " + std::to_string(index) + " of " +
                       std::to_string(elements) + " elements");
  }
}

void check_index(size_t number, const char* side, int32_t index, size_t count) {
  if (index < 0 || static_cast<size_t>(index) >= count) {
    refuse(number, std::string(side) + " buffer " + std::to_string(index) +
                       " does not exist; there are " + std::to_string(count));
  }
}

void check_block(size_t number, const CopyBlock& block, const std::vector<BufferShape>& sources,
                 const std::vector<BufferShape>& destinations) {
  const bool zero_fill = block.src == kZeroFill;
  if (!zero_fill) check_index(number, "source", block.src, sources.size());
  check_index(number, "destination", block.dst, destinations.size());
  if ((block.flags & ~kScaleOnce) != 0) {
    refuse(number, "flags " + std::to_string(block.flags) + " are not known; only SCALE_ONCE is");
  }
  if (!std::isfinite(block.scale)) refuse(number, "the scale is not a finite number");

  bool empty = false;
  for (int64_t size : block.size) {
    if (size < 0) refuse(number, "size " + std::to_string(size) + " is negative");
    empty |= size == 0;
  }
  if (empty) return;

  for (int axis = 0; axis < 3; ++axis) {
    if (block.size[axis] > 1 && block.dst_stride[axis] == 0) {
      refuse(number, "destination stride 0 writes the same elements more than once");
    }
  }
  check_extent(number, "destination", block.dst, block.dst_offset, block.size, block.dst_stride,
               destinations);
  if (!zero_fill) {
    check_extent(number, "source", block.src, block.src_offset, block.size, block.src_stride,
                 sources);
  }
}

void check_buffers(const char* side, const std::vector<BufferShape>& buffers) {
  for (size_t i = 0; i < buffers.size(); ++i) {
    const std::string name = std::string(side) + " buffer " + std::to_string(i);
    const int dtype = static_cast<int>(buffers[i].dtype);
    if (dtype < 0 || dtype >= kDTypeCount) {
      throw std::invalid_argument(name + ": dtype code " + std::to_string(dtype) +
                                  " is not known; 0 is fp32, 1 is fp16, 2 is bf16");
    }
    if (buffers[i].elements < 0) {
      throw std::invalid_argument(name + ": size " + std::to_string(buffers[i].elements) +
                                  " is negative");
    }
  }
}

}  // namespace

void check_blocks(const std::vector<CopyBlock>& blocks, const std::vector<BufferShape>& sources,
                  const std::vector<BufferShape>& destinations) {
  check_buffers("source", sources);
  check_buffers("destination", destinations);
  for (size_t i = 0; i < blocks.size(); ++i) check_block(i, blocks[i], sources, destinations);
}

}  // namespace lora_refit
