// Twin of csrc/cuda/ptx.cuh where g++ compiles a kernel: the same wrappers with the meaning that
// "PTX ISA" documents, lane by lane.
#pragma once

#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>

#include "convert.h"
#include "cuemu/async_copy.h"
#include "cuemu/error.h"

namespace lora_refit::ptx {

inline void check_alignment(const void* address, uintptr_t bytes) {
  if (reinterpret_cast<uintptr_t>(address) % bytes == 0) return;
  cuemu::Block& block = cuemu::Block::running();
  throw cuemu::Error("misaligned access of " + std::to_string(bytes) +
                     " bytes: " + block.where(block.current()));
}

template <class T>
T load(const void* address) {
  check_alignment(address, sizeof(T));
  return *static_cast<const T*>(address);
}

template <class T>
void store(void* address, T v) {
  check_alignment(address, sizeof(T));
  *static_cast<T*>(address) = v;
}

// ---- global memory --------------------------------------------------------------------------

inline uint4 load_streaming_16(const void* address) { return load<uint4>(address); }
inline uint2 load_streaming_8(const void* address) { return load<uint2>(address); }
inline uint4 load_16(const void* address) { return load<uint4>(address); }
inline uint32_t load_4(const void* address) { return load<uint32_t>(address); }
inline uint16_t load_2(const void* address) { return load<uint16_t>(address); }

inline void store_streaming_16(void* address, uint4 v) { store(address, v); }
inline void store_streaming_8(void* address, uint2 v) { store(address, v); }
inline void store_4(void* address, uint32_t v) { store(address, v); }
inline void store_2(void* address, uint16_t v) { store(address, v); }

inline void add_u64(uint64_t* address, uint64_t v) {
  check_alignment(address, sizeof v);
  __atomic_fetch_add(address, v, __ATOMIC_RELAXED);
}

inline void add_f64(double* address, double v) {
  check_alignment(address, sizeof v);
  uint64_t* bits = reinterpret_cast<uint64_t*>(address);
  uint64_t before = __atomic_load_n(bits, __ATOMIC_RELAXED);
  uint64_t after;
  do {
    double sum;
    std::memcpy(&sum, &before, sizeof sum);
    sum += v;
    std::memcpy(&after, &sum, sizeof after);
  } while (!__atomic_compare_exchange_n(bits, &before, after, false, __ATOMIC_RELAXED,
                                        __ATOMIC_RELAXED));
}

// ---- shared memory --------------------------------------------------------------------------

inline char* dynamic_shared() { return cuemu::Block::running().dynamic_shared(); }

// ---- warp -----------------------------------------------------------------------------------

inline uint32_t shuffle_xor(uint32_t v, int lane_bits) {
  return __shfl_xor_sync(cuemu::kAllLanes, v, lane_bits);
}

// ---- arithmetic -----------------------------------------------------------------------------

inline float multiply_add(float a, float b, float c) { return std::fma(a, b, c); }

inline uint32_t add_if_different(uint32_t count, uint32_t a, uint32_t b) {
  return a != b ? count + 1 : count;
}

inline uint32_t pair_of(uint16_t low, uint16_t high) { return uint32_t{high} << 16 | low; }
inline uint16_t half_of(uint32_t pair, unsigned half) {
  return static_cast<uint16_t>(pair >> (16 * half));
}

inline uint32_t round_bf16x2(float low, float high) {
  const auto round = [](float v) { return std::isnan(v) ? uint16_t{0x7FFF} : float_to_bf16(v); };
  return pair_of(round(low), round(high));
}

inline uint32_t round_f16x2(float low, float high) {
  const auto round = [](float v) { return std::isnan(v) ? uint16_t{0x7FFF} : float_to_f16(v); };
  return pair_of(round(low), round(high));
}

inline float2 widen_f16x2(uint32_t pair) {
  return {f16_to_float(half_of(pair, 0)), f16_to_float(half_of(pair, 1))};
}

// ---- matrix ---------------------------------------------------------------------------------

struct RowFragment {
  uint32_t r[4];
};
struct ColFragment {
  uint32_t r[2];
};
struct Accumulator {
  float r[4];
};

// One 8 x 8 matrix of ldmatrix, whose rows lanes `first` to `first + 7` point to: the pair of
// elements that the calling lane receives.
inline uint32_t matrix_pair(const cuemu::Payloads& rows, unsigned first, bool transposed) {
  const auto element = [&](unsigned row, unsigned col) {
    return cuemu::payload_of<const uint16_t*>(rows, first + row)[col];
  };
  const unsigned g = cuemu::lane_number() / 4;
  const unsigned q = cuemu::lane_number() % 4 * 2;
  return transposed ? pair_of(element(q, g), element(q + 1, g))
                    : pair_of(element(g, q), element(g, q + 1));
}

inline RowFragment load_row_fragment(const void* row) {
  check_alignment(row, 16);
  const auto& rows = cuemu::exchange("ldmatrix", cuemu::kAllLanes, &row, sizeof row);
  RowFragment f;
  for (unsigned i = 0; i < 4; ++i) f.r[i] = matrix_pair(rows, 8 * i, false);
  return f;
}

inline void load_col_fragments(ColFragment (&f)[2], const void* row) {
  check_alignment(row, 16);
  const auto& rows = cuemu::exchange("ldmatrix.trans", cuemu::kAllLanes, &row, sizeof row);
  for (unsigned i = 0; i < 4; ++i) f[i / 2].r[i % 2] = matrix_pair(rows, 8 * i, true);
}

struct Operands {
  RowFragment rows;
  ColFragment cols;
};

// sums += rows * cols with kDepth products for each sum. `row_value(operands, i, k)` and
// `col_value(operands, k)` pick an element out of the fragments of the lane that holds it.
template <int kDepth, class RowValue, class ColValue>
void multiply_accumulate(const char* operation, Accumulator& sums, const Operands& mine,
                         int lane_elements, RowValue row_value, ColValue col_value) {
  const auto& lanes = cuemu::exchange(operation, cuemu::kAllLanes, &mine, sizeof mine);
  const unsigned lane = cuemu::lane_number();
  const unsigned first_col = lane % 4 * 2;
  Operands rows[4];     // of the quad that holds row lane / 4
  Operands cols[2][4];  // of those that hold columns first_col and first_col + 1
  for (unsigned i = 0; i < 4; ++i) {
    rows[i] = cuemu::payload_of<Operands>(lanes, lane / 4 * 4 + i);
    cols[0][i] = cuemu::payload_of<Operands>(lanes, first_col * 4 + i);
    cols[1][i] = cuemu::payload_of<Operands>(lanes, (first_col + 1) * 4 + i);
  }
  for (unsigned e = 0; e < 4; ++e) {
    const unsigned i = lane / 4 + 8 * (e / 2);
    for (unsigned k = 0; k < kDepth; ++k) {
      const unsigned quad = k / lane_elements % 4;
      sums.r[e] += row_value(rows[quad].rows, i, k) * col_value(cols[e % 2][quad].cols, k);
    }
  }
}

template <class ToFloat>
void mma_halves(const char* operation, Accumulator& sums, const Operands& mine, ToFloat to_float) {
  multiply_accumulate<16>(
      operation, sums, mine, 2,
      [&](const RowFragment& rows, unsigned i, unsigned k) {
        return to_float(half_of(rows.r[i / 8 + 2 * (k / 8)], k % 2));
      },
      [&](const ColFragment& cols, unsigned k) { return to_float(half_of(cols.r[k / 8], k % 2)); });
}

inline void mma_bf16(Accumulator& sums, const RowFragment& rows, const ColFragment& cols) {
  mma_halves("mma.bf16", sums, {rows, cols}, bf16_to_float);
}

inline void mma_f16(Accumulator& sums, const RowFragment& rows, const ColFragment& cols) {
  mma_halves("mma.f16", sums, {rows, cols}, f16_to_float);
}

// The bits below tf32's do not count.
inline constexpr uint32_t kBelowTf32 = 0x1FFF;

inline void mma_tf32(Accumulator& sums, const RowFragment& rows, const ColFragment& cols) {
  const auto value = [](uint32_t bits) { return float_from_bits(bits & ~kBelowTf32); };
  multiply_accumulate<8>(
      "mma.tf32", sums, {rows, cols}, 1,
      [&](const RowFragment& f, unsigned i, unsigned k) { return value(f.r[i / 8 + 2 * (k / 4)]); },
      [&](const ColFragment& f, unsigned k) { return value(f.r[k / 4]); });
}

// ---- asynchronous copies --------------------------------------------------------------------

inline void copy_async_16(void* shared, const void* global) {
  check_alignment(shared, 16);
  check_alignment(global, 16);
  cuemu::start_copy({shared, global, 16});
}

inline void wait_for_copies() {
  for (const cuemu::AsyncCopy& copy : cuemu::take_copies()) {
    std::memcpy(copy.shared, copy.global, static_cast<size_t>(copy.bytes));
  }
}

}  // namespace lora_refit::ptx
