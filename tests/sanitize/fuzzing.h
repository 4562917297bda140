// What the fuzz drivers share: random choices, and buffers of exactly the size that is needed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <random>
#include <stdexcept>
#include <vector>

#include "plan/block_check.h"

namespace lora_refit {

using Bytes = std::vector<std::byte>;

class Random {
 public:
  explicit Random(uint32_t seed) : engine_(seed) {}
  int64_t from(int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(engine_);
  }
  template <class T, size_t kCount>
  T one_of(const T (&choices)[kCount]) {
    return choices[from(0, kCount - 1)];
  }
  DType dtype() { return static_cast<DType>(from(0, kDTypeCount - 1)); }
  void fill(Bytes& bytes) {
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(engine_());
  }

 private:
  std::mt19937 engine_;
};

// Exactly as many bytes as the elements need, so that the redzones begin right behind them.
inline std::vector<Bytes> allocate(const std::vector<BufferShape>& shapes, std::byte fill) {
  std::vector<Bytes> buffers;
  for (const BufferShape& shape : shapes) {
    buffers.emplace_back(shape.elements * element_bytes(shape.dtype), fill);
    buffers.back().shrink_to_fit();
  }
  return buffers;
}

inline std::vector<uint64_t> addresses(const std::vector<Bytes>& buffers) {
  std::vector<uint64_t> result;
  for (const Bytes& buffer : buffers) result.push_back(reinterpret_cast<uint64_t>(buffer.data()));
  return result;
}

inline void require(bool condition, const char* what) {
  if (!condition) throw std::runtime_error(what);
}

// Calls check(random) for seeds 0 to `cases` - 1; false once one throws, which is printed.
template <class Check>
bool all_pass(int cases, Check check) {
  for (int seed = 0; seed < cases; ++seed) {
    Random random(static_cast<uint32_t>(seed));
    try {
      check(random);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "seed %d: %s\n", seed, error.what());
      return false;
    }
  }
  return true;
}

}  // namespace lora_refit
