// Random numbers and exactly sized buffers for kernels that the emulator runs.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <random>
#include <vector>

#include "convert.h"

namespace lora_refit::testing {

class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}

  int64_t from(int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(engine_);
  }
  template <class T, size_t kCount>
  T one_of(const T (&choices)[kCount]) {
    return choices[from(0, kCount - 1)];
  }
  uint32_t bits() { return static_cast<uint32_t>(engine_()); }

 private:
  std::mt19937_64 engine_;
};

// `bytes` bytes at an address that is `misaligned` bytes behind a multiple of 64. Nothing follows
// them, so AddressSanitizer sees an access one byte too far.
class Buffer {
 public:
  static constexpr unsigned char kPoison = 0x5A;

  Buffer(int64_t bytes, int64_t misaligned) : bytes_(bytes), misaligned_(misaligned) {
    void* memory = nullptr;
    if (posix_memalign(&memory, 64, total_bytes()) != 0) throw std::bad_alloc();
    memory_.reset(static_cast<std::byte*>(memory));
    std::memset(memory, kPoison, total_bytes());
  }

  std::byte* data() const { return memory_.get() + misaligned_; }
  uint64_t address() const { return reinterpret_cast<uint64_t>(data()); }
  int64_t bytes() const { return bytes_; }

  // Also compares what lies before the buffer.
  bool equals(const Buffer& other) const {
    return total_bytes() == other.total_bytes() &&
           std::memcmp(memory_.get(), other.memory_.get(), total_bytes()) == 0;
  }

 private:
  struct Free {
    void operator()(std::byte* memory) const { std::free(memory); }
  };

  size_t total_bytes() const { return static_cast<size_t>(bytes_ + misaligned_); }

  int64_t bytes_;
  int64_t misaligned_;
  std::unique_ptr<std::byte, Free> memory_;
};

inline std::vector<uint64_t> addresses(const std::vector<Buffer>& buffers) {
  std::vector<uint64_t> result;
  for (const Buffer& buffer : buffers) result.push_back(buffer.address());
  return result;
}

// Ordinary numbers, any bits at all, and the values that conversions get wrong.
template <DType kDType>
void fill_with_values(Random& random, Buffer& buffer) {
  using Bits = typename Element<kDType>::Bits;
  constexpr uint32_t kSpecial[] = {0x00000000, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00000,
                                   0xFFC01234, 0x00000001, 0x007FFFFF, 0x33000001, 0x387FF000,
                                   0x477FEFFF, 0x477FF000, 0x7F7FFFFF, 0x3F808000, 0x3F818000};
  constexpr uint32_t kInfinity = sizeof(Bits) == 4       ? 0x7F800000
                                 : kDType == DType::kF16 ? 0x7C00
                                                         : 0x7F80;
  for (int64_t i = 0; i < buffer.bytes() / static_cast<int64_t>(sizeof(Bits)); ++i) {
    Bits bits = static_cast<Bits>(random.bits());
    const int64_t kind = random.from(0, 9);
    if (kind < 6) {
      const float magnitude = std::ldexp(1.0f, static_cast<int>(random.from(-28, 18)));
      bits = Element<kDType>::from_float(magnitude * static_cast<float>(random.from(-9999, 9999)));
    } else if (kind == 6) {
      bits = Element<kDType>::from_float(float_from_bits(random.one_of(kSpecial)));
    } else if (kind == 7) {
      bits = static_cast<Bits>(kInfinity + random.from(0, 1));  // infinity or a signalling NaN
    }
    std::memcpy(buffer.data() + i * sizeof(Bits), &bits, sizeof bits);
  }
}

inline void fill_with_values(Random& random, DType dtype, Buffer& buffer) {
  switch (dtype) {
    case DType::kF32:
      return fill_with_values<DType::kF32>(random, buffer);
    case DType::kF16:
      return fill_with_values<DType::kF16>(random, buffer);
    case DType::kBF16:
      return fill_with_values<DType::kBF16>(random, buffer);
  }
}

}  // namespace lora_refit::testing
