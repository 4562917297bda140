#include "plan/checks.h"

#include <cmath>
#include <stdexcept>

namespace lora_refit {
namespace {

// Products of 64-bit sizes and strides do not fit 64 bits; three of them and an offset fit 128.
__extension__ typedef __int128 Wide;

std::string text(Wide value) {
  constexpr Wide kMost = INT64_MAX;
  if (value > kMost) return "more than 2^63";
  if (value < -kMost) return "less than -2^63";
  return std::to_string(static_cast<int64_t>(value));
}

}  // namespace

void refuse(const Item& item, const std::string& reason) {
  throw std::invalid_argument(std::string(item.kind) + " " + std::to_string(item.number) + ": " +
                              reason);
}

void check_extent(const Item& item, const std::string& side, int32_t index, int64_t offset,
                  const std::vector<Loop>& loops, const std::vector<BufferShape>& buffers) {
  Wide lowest = offset;
  Wide highest = offset;
  for (const Loop& loop : loops) {
    const Wide reach = Wide{loop.size - 1} * loop.stride;
    (reach < 0 ? lowest : highest) += reach;
  }
  const int64_t elements = buffers[index].elements;
  if (lowest < 0 || highest >= elements) {
    refuse(item, side + " elements " + text(lowest) + " to " + text(highest) + " lie outside " +
                     side + " buffer " + std::to_string(index) + " of " + std::to_string(elements) +
                     " elements");
  }
}

void check_index(const Item& item, const std::string& side, int32_t index, size_t count) {
  if (index < 0 || static_cast<size_t>(index) >= count) {
    refuse(item, side + " buffer " + std::to_string(index) + " does not exist; there are " +
                     std::to_string(count));
  }
}

void check_not_negative(const Item& item, const char* name, int64_t value) {
  if (value < 0) refuse(item, std::string(name) + " " + std::to_string(value) + " is negative");
}

void check_finite_scale(const Item& item, float scale) {
  if (!std::isfinite(scale)) refuse(item, "the scale is not a finite number");
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

}  // namespace lora_refit
