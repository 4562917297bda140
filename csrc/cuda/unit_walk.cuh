// Deals the elements of a box to the lanes of a warp.
#pragma once

#include <cstddef>
#include <cstdint>

#include "block.h"

namespace lora_refit::cuda {

// Divides numbers below 2^15 by one divisor below 2^15 with a multiplication.
struct SmallDivisor {
  static constexpr int kShift = 31;
  uint32_t multiplier;

  __device__ __forceinline__ static SmallDivisor by(uint32_t divisor) {
    return {(1u << kShift) / divisor + 1};
  }

  __device__ __forceinline__ uint32_t divide(uint32_t number) const {
    return static_cast<uint32_t>((uint64_t{number} * multiplier) >> kShift);
  }
};

// One side of a box: its buffer, its strides, and the size of its elements.
struct BoxSide {
  uint64_t base;
  int64_t offset;
  const int64_t* stride;
  int log2_bytes;

  __device__ __forceinline__ uint64_t bytes(int64_t elements) const {
    return static_cast<uint64_t>(elements) << log2_bytes;
  }
  __device__ __forceinline__ uint64_t byte_of_column(int64_t col) const {
    return bytes(offset + col * stride[2]);
  }
};

// Where the units of a box lie on one side. A unit is a number of neighbouring elements in one row;
// units are numbered row by row and batch by batch, so that short rows fill a warp too.
struct UnitPlaces {
  uint64_t first;
  uint64_t per_unit;
  uint64_t per_row;  // counts what the units of a row have already advanced, and so on
  uint64_t per_batch;

  __device__ __forceinline__ static UnitPlaces of(const BoxSide& side, uint64_t first,
                                                  int64_t unit_elements, int64_t row_units,
                                                  int64_t rows) {
    const int64_t unit = side.stride[2] * unit_elements;
    return {first, side.bytes(unit), side.bytes(side.stride[1] - unit * row_units),
            side.bytes(side.stride[0] - side.stride[1] * rows)};
  }

  __device__ __forceinline__ uint64_t at(uint32_t batch, uint32_t row, uint32_t unit) const {
    return first + batch * per_batch + row * per_row + unit * per_unit;
  }
};

// The units of some columns of a box.
struct UnitWalk {
  UnitPlaces src;
  UnitPlaces dst;
  SmallDivisor row_units;
  SmallDivisor rows;
  uint32_t count;

  // The address that a unit is read from.
  __device__ __forceinline__ const std::byte* source(uint32_t unit) const {
    return reinterpret_cast<const std::byte*>(place(src, unit));
  }

  // Where a unit is written, in bytes from the destination buffer's base.
  __device__ __forceinline__ uint64_t destination(uint32_t unit) const { return place(dst, unit); }

 private:
  __device__ __forceinline__ uint64_t place(const UnitPlaces& places, uint32_t unit) const {
    const uint32_t row = row_units.divide(unit);
    return places.at(rows.divide(row), row, unit);
  }
};

__device__ __forceinline__ UnitWalk walk_columns(const CopyBlock& box, const BoxSide& src,
                                                 const BoxSide& dst, int first_col,
                                                 int unit_elements, int row_units) {
  const uint32_t rows = static_cast<uint32_t>(box.size[1]);
  const uint64_t src_first = src.base + src.byte_of_column(first_col);
  const uint64_t dst_first = dst.byte_of_column(first_col);
  return {UnitPlaces::of(src, src_first, unit_elements, row_units, rows),
          UnitPlaces::of(dst, dst_first, unit_elements, row_units, rows),
          SmallDivisor::by(row_units), SmallDivisor::by(rows),
          static_cast<uint32_t>(box.size[0]) * rows * row_units};
}

}  // namespace lora_refit::cuda
