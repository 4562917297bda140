// The PTX instructions that the kernels use, one wrapper each. Source: "PTX ISA" by NVIDIA, at the
// instruction named above each wrapper.
//
// tests/gpu/cuemu has a twin of this file that states the documented meaning in plain C++, so the
// kernels also run on a CPU. A new wrapper needs both.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace lora_refit::ptx {

// ---- global memory --------------------------------------------------------------------------
// Addresses are aligned to the access. `load` reads memory that nobody writes during the launch;
// `streaming` is for bytes that are used once and should not displace others in L1.

// ld.global.nc.L1::no_allocate.v4.u32
__device__ __forceinline__ uint4 load_streaming_16(const void* address) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address));
  return v;
}

// ld.global.nc.L1::no_allocate.v2.u32
__device__ __forceinline__ uint2 load_streaming_8(const void* address) {
  uint2 v;
  asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
               : "=r"(v.x), "=r"(v.y)
               : "l"(address));
  return v;
}

// ld.global.nc.v4.u32
__device__ __forceinline__ uint4 load_16(const void* address) {
  uint4 v;
  asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address));
  return v;
}

// ld.global.nc.u32
__device__ __forceinline__ uint32_t load_4(const void* address) {
  uint32_t v;
  asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(v) : "l"(address));
  return v;
}

// ld.global.nc.u16
__device__ __forceinline__ uint16_t load_2(const void* address) {
  uint16_t v;
  asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(v) : "l"(address));
  return v;
}

// st.global.L1::no_allocate.v4.u32
__device__ __forceinline__ void store_streaming_16(void* address, uint4 v) {
  asm volatile("st.global.L1::no_allocate.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(v.x),
               "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

// st.global.L1::no_allocate.v2.u32
__device__ __forceinline__ void store_streaming_8(void* address, uint2 v) {
  asm volatile("st.global.L1::no_allocate.v2.u32 [%0], {%1, %2};" ::"l"(address), "r"(v.x), "r"(v.y)
               : "memory");
}

// st.global.u32
__device__ __forceinline__ void store_4(void* address, uint32_t v) {
  asm volatile("st.global.u32 [%0], %1;" ::"l"(address), "r"(v) : "memory");
}

// st.global.u16
__device__ __forceinline__ void store_2(void* address, uint16_t v) {
  asm volatile("st.global.u16 [%0], %1;" ::"l"(address), "h"(v) : "memory");
}

// red.relaxed.gpu.global.add.u64
__device__ __forceinline__ void add_u64(uint64_t* address, uint64_t v) {
  asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(address), "l"(v) : "memory");
}

// red.relaxed.gpu.global.add.f64
__device__ __forceinline__ void add_f64(double* address, double v) {
  asm volatile("red.relaxed.gpu.global.add.f64 [%0], %1;" ::"l"(address), "d"(v) : "memory");
}

// ---- shared memory --------------------------------------------------------------------------

// The dynamic shared memory of the launch, 128-byte aligned.
__device__ __forceinline__ char* dynamic_shared() {
  extern __shared__ __align__(128) char dynamic_shared_memory[];
  return dynamic_shared_memory;
}

// ---- warp -----------------------------------------------------------------------------------

// shfl.sync.bfly.b32 with all 32 lanes: the value of the lane whose number differs in `lane_bits`.
__device__ __forceinline__ uint32_t shuffle_xor(uint32_t v, int lane_bits) {
  uint32_t other;
  asm volatile("shfl.sync.bfly.b32 %0, %1, %2, 0x1f, 0xffffffff;"
               : "=r"(other)
               : "r"(v), "r"(lane_bits));
  return other;
}

// ---- arithmetic -----------------------------------------------------------------------------

// fma.rn.f32: a * b + c, rounded once
__device__ __forceinline__ float multiply_add(float a, float b, float c) {
  float sum;
  asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(sum) : "f"(a), "f"(b), "f"(c));
  return sum;
}

// setp.ne.u32 and a guarded add.u32: count + 1 where a != b, else count
__device__ __forceinline__ uint32_t add_if_different(uint32_t count, uint32_t a, uint32_t b) {
  asm("{.reg .pred different; setp.ne.u32 different, %1, %2; @different add.u32 %0, %0, 1;}"
      : "+r"(count)
      : "r"(a), "r"(b));
  return count;
}

// cvt.rn.bf16x2.f32: `low` in the low half; a NaN becomes 0x7FFF
__device__ __forceinline__ uint32_t round_bf16x2(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// cvt.rn.f16x2.f32: `low` in the low half; a NaN becomes 0x7FFF
__device__ __forceinline__ uint32_t round_f16x2(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// cvt.f32.f16 of both halves, the low one first
__device__ __forceinline__ float2 widen_f16x2(uint32_t pair) {
  float2 v;
  asm("{.reg .b16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; cvt.f32.f16 %1, high;}"
      : "=f"(v.x), "=f"(v.y)
      : "r"(pair));
  return v;
}

// ---- matrix ---------------------------------------------------------------------------------
// Fragments as in "Matrix Fragments for mma.m16n8k16" and "... mma.m16n8k8": lane 4g + q holds
// rows g and g + 8 of the 16-row operand and of the sums, column g of the 8-column operand.

// A tf32 register holds fp32 whose low 13 bits are zero.
struct RowFragment {  // 16 x 16 of 2 bytes or 16 x 8 of tf32: the "A" of mma
  uint32_t r[4];
};
struct ColFragment {  // 16 x 8 of 2 bytes or 8 x 8 of tf32: the "B" of mma
  uint32_t r[2];
};
struct Accumulator {  // 16 x 8 of fp32: the "C" and "D" of mma
  float r[4];
};

__device__ __forceinline__ uint32_t shared_address(const void* address) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(address));
}

// ldmatrix.sync.aligned.m8n8.x4.shared.b16: 16 x 16 elements stored row by row. Lane l gives the
// address of row l % 16, at element 8 * (l / 16).
__device__ __forceinline__ RowFragment load_row_fragment(const void* row) {
  RowFragment f;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(f.r[0]), "=r"(f.r[1]), "=r"(f.r[2]), "=r"(f.r[3])
               : "r"(shared_address(row))
               : "memory");
  return f;
}

// ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16: two neighbouring fragments, 16 x 16 elements
// stored by rows of K. Lane l gives the address of row l % 16, at element 8 * (l / 16).
__device__ __forceinline__ void load_col_fragments(ColFragment (&f)[2], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(f[0].r[0]), "=r"(f[0].r[1]), "=r"(f[1].r[0]), "=r"(f[1].r[1])
               : "r"(shared_address(row))
               : "memory");
}

// mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32: sums += rows * cols
__device__ __forceinline__ void mma_bf16(Accumulator& sums, const RowFragment& rows,
                                         const ColFragment& cols) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums.r[0]), "+f"(sums.r[1]), "+f"(sums.r[2]), "+f"(sums.r[3])
      : "r"(rows.r[0]), "r"(rows.r[1]), "r"(rows.r[2]), "r"(rows.r[3]), "r"(cols.r[0]),
        "r"(cols.r[1]));
}

// mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32: sums += rows * cols
__device__ __forceinline__ void mma_f16(Accumulator& sums, const RowFragment& rows,
                                        const ColFragment& cols) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums.r[0]), "+f"(sums.r[1]), "+f"(sums.r[2]), "+f"(sums.r[3])
      : "r"(rows.r[0]), "r"(rows.r[1]), "r"(rows.r[2]), "r"(rows.r[3]), "r"(cols.r[0]),
        "r"(cols.r[1]));
}

// mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32: sums += rows * cols
__device__ __forceinline__ void mma_tf32(Accumulator& sums, const RowFragment& rows,
                                         const ColFragment& cols) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums.r[0]), "+f"(sums.r[1]), "+f"(sums.r[2]), "+f"(sums.r[3])
      : "r"(rows.r[0]), "r"(rows.r[1]), "r"(rows.r[2]), "r"(rows.r[3]), "r"(cols.r[0]),
        "r"(cols.r[1]));
}

// ---- asynchronous copies --------------------------------------------------------------------

// cp.async.cg.shared.global of 16 bytes
__device__ __forceinline__ void copy_async_16(void* shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(shared)),
               "l"(global)
               : "memory");
}

// cp.async.wait_all: until the calling thread's copies are in shared memory
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

}  // namespace lora_refit::ptx
