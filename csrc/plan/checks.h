// What the checks of copy blocks and of merge blocks share.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "plan/block_check.h"

namespace lora_refit {

// What an error names: "block 3", "segment 0".
struct Item {
  const char* kind;
  size_t number;
};

[[noreturn]] void refuse(const Item& item, const std::string& reason);

// One loop of an access; sizes and strides in elements.
struct Loop {
  int64_t size;
  int64_t stride;
};

// `side` is what the error calls the buffer. `loops` must not be empty ones.
void check_extent(const Item& item, const std::string& side, int32_t index, int64_t offset,
                  const std::vector<Loop>& loops, const std::vector<BufferShape>& buffers);

void check_index(const Item& item, const std::string& side, int32_t index, size_t count);

// "size -3 is negative", with `name` for size.
void check_not_negative(const Item& item, const char* name, int64_t value);

void check_finite_scale(const Item& item, float scale);

// Throws for dtypes that do not exist and negative sizes, naming the buffer.
void check_buffers(const char* side, const std::vector<BufferShape>& buffers);

}  // namespace lora_refit
