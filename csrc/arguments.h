// Python arguments as the extension's C++ takes them. Arrays are never converted.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "plan/block_check.h"

namespace lora_refit {

using Words = pybind11::array_t<uint64_t, pybind11::array::c_style>;

inline void check_length(const char* name, const Words& words, size_t length) {
  if (words.ndim() == 1 && static_cast<size_t>(words.shape(0)) == length) return;
  throw std::invalid_argument(std::string(name) + " must be a vector of " + std::to_string(length) +
                              " elements");
}

inline std::vector<uint64_t> copy_words(const char* name, const Words& words, size_t length) {
  check_length(name, words, length);
  return std::vector<uint64_t>(words.data(), words.data() + length);
}

// A packed array of structs, which numpy holds as records or as bytes.
template <typename Row>
std::vector<Row> unpack(const char* name, const pybind11::buffer& packed) {
  const pybind11::buffer_info info = packed.request();
  if (PyBuffer_IsContiguous(info.view(), 'C') == 0) {
    throw std::invalid_argument(std::string(name) + " must be contiguous bytes");
  }
  const size_t bytes = static_cast<size_t>(info.size * info.itemsize);
  if (bytes % sizeof(Row) != 0) {
    throw std::invalid_argument(std::string(name) + " has " + std::to_string(bytes) +
                                " bytes, which is not a multiple of " +
                                std::to_string(sizeof(Row)));
  }
  std::vector<Row> rows(bytes / sizeof(Row));
  if (bytes > 0) std::memcpy(rows.data(), info.ptr, bytes);
  return rows;
}

// `sums` as the MergeSums of `modules` modules, to be overwritten.
inline MergeSums* writable_sums(const pybind11::buffer& sums, size_t modules) {
  const pybind11::buffer_info info = sums.request(true);
  const size_t bytes = static_cast<size_t>(info.size * info.itemsize);
  if (PyBuffer_IsContiguous(info.view(), 'C') == 0 || bytes != modules * sizeof(MergeSums)) {
    throw std::invalid_argument("sums must be " + std::to_string(modules) +
                                " contiguous MergeSums, one for each module");
  }
  return static_cast<MergeSums*>(info.ptr);
}

inline std::vector<BufferShape> buffer_shapes(const char* side, const std::vector<int>& dtypes,
                                              const std::vector<int64_t>& sizes) {
  if (dtypes.size() != sizes.size()) {
    throw std::invalid_argument(std::string(side) + ": " + std::to_string(dtypes.size()) +
                                " dtypes but " + std::to_string(sizes.size()) + " sizes");
  }
  std::vector<BufferShape> shapes;
  for (size_t i = 0; i < dtypes.size(); ++i) {
    shapes.push_back(BufferShape{static_cast<DType>(dtypes[i]), sizes[i]});
  }
  return shapes;
}

}  // namespace lora_refit
