// 64-bit words in memory shared between processes.
#pragma once

#include <cstdint>

namespace lora_refit {

inline uint64_t load_acquire(const uint64_t* word) {
  return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}

inline void store_release(uint64_t* word, uint64_t value) {
  __atomic_store_n(word, value, __ATOMIC_RELEASE);
}

inline void fence_seq_cst() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

inline bool compare_exchange(uint64_t* word, uint64_t expected, uint64_t desired) {
  return __atomic_compare_exchange_n(word, &expected, desired, false, __ATOMIC_SEQ_CST,
                                     __ATOMIC_SEQ_CST);
}

inline void add_relaxed(uint64_t* word, uint64_t value) {
  __atomic_fetch_add(word, value, __ATOMIC_RELAXED);
}

}  // namespace lora_refit
