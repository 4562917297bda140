// The sanitizers' functions for programs that switch stacks. Weak: null where the program is not
// built with that sanitizer, so that one build of the emulator serves all.
//
// The emulator itself is never built with -fsanitize=thread. Its own bookkeeping is shared by all
// threads of a block, and ThreadSanitizer would take it for synchronisation between them. It is
// told explicitly which synchronisation CUDA promises.
#pragma once

#include <cstddef>

extern "C" {
[[gnu::weak]] void __sanitizer_start_switch_fiber(void** save, const void* bottom, size_t size);
[[gnu::weak]] void __sanitizer_finish_switch_fiber(void* save, const void** bottom, size_t* size);

[[gnu::weak]] void* __tsan_create_fiber(unsigned flags);
[[gnu::weak]] void __tsan_destroy_fiber(void* fiber);
[[gnu::weak]] void __tsan_switch_to_fiber(void* fiber, unsigned flags);
[[gnu::weak]] void* __tsan_get_current_fiber();
[[gnu::weak]] void __tsan_acquire(void* address);
[[gnu::weak]] void __tsan_release(void* address);
}

namespace cuemu {

// What was done before `release` of a token happens before what is done after `acquire` of it.
class Token {
 public:
  void release() {
    if (__tsan_release != nullptr) __tsan_release(this);
  }
  void acquire() {
    if (__tsan_acquire != nullptr) __tsan_acquire(this);
  }

 private:
  char address_ = 0;
};

}  // namespace cuemu
