#include "cuemu/fiber.h"

#include <sys/mman.h>

#include <new>
#include <utility>

#include "cuemu/sanitizers.h"

// Saves the callee-saved registers and the stack pointer, and continues at another stack.
extern "C" void cuemu_switch_stack(void** save_stack_pointer, void* stack_pointer);
asm(R"(
.text
.type cuemu_switch_stack, @function
.globl cuemu_switch_stack
.hidden cuemu_switch_stack
cuemu_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size cuemu_switch_stack, . - cuemu_switch_stack
)");

namespace cuemu {
namespace {

constexpr size_t kGuardBytes = 4096;
constexpr size_t kStackBytes = 256 * 1024;
constexpr int kSavedRegisters = 6;

thread_local Fiber* starting = nullptr;

void* map_stack() {
  void* stack = mmap(nullptr, kGuardBytes + kStackBytes, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (stack == MAP_FAILED) throw std::bad_alloc();
  mprotect(stack, kGuardBytes, PROT_NONE);
  return stack;
}

}  // namespace

Fiber::Fiber(std::function<void()> body) : body_(std::move(body)), stack_(map_stack()) {
  void** top = reinterpret_cast<void**>(static_cast<char*>(stack_) + kGuardBytes + kStackBytes);
  top -= 2;  // at a function's entry the stack pointer is 8 below a multiple of 16
  *--top = nullptr;
  *--top = reinterpret_cast<void*>(&Fiber::enter);
  for (int i = 0; i < kSavedRegisters; ++i) *--top = nullptr;
  stack_pointer_ = top;
  if (__tsan_create_fiber != nullptr) tsan_ = __tsan_create_fiber(0);
}

Fiber::~Fiber() {
  if (tsan_ != nullptr) __tsan_destroy_fiber(tsan_);
  munmap(stack_, kGuardBytes + kStackBytes);
}

void Fiber::enter() {
  Fiber& self = *starting;
  if (__sanitizer_finish_switch_fiber != nullptr) {
    __sanitizer_finish_switch_fiber(nullptr, &self.resumer_stack_, &self.resumer_stack_bytes_);
  }
  self.body_();
  self.done_ = true;
  self.suspend();
  __builtin_unreachable();
}

void Fiber::resume() {
  constexpr unsigned kWithoutSynchronisation = 1;
  starting = this;
  if (__sanitizer_start_switch_fiber != nullptr) {
    __sanitizer_start_switch_fiber(&resumer_fake_stack_, static_cast<char*>(stack_) + kGuardBytes,
                                   kStackBytes);
  }
  if (tsan_ != nullptr) {
    resumer_tsan_ = __tsan_get_current_fiber();
    __tsan_switch_to_fiber(tsan_, kWithoutSynchronisation);
  }
  cuemu_switch_stack(&resumer_stack_pointer_, stack_pointer_);
  if (__sanitizer_finish_switch_fiber != nullptr) {
    __sanitizer_finish_switch_fiber(resumer_fake_stack_, nullptr, nullptr);
  }
}

void Fiber::suspend() {
  constexpr unsigned kWithoutSynchronisation = 1;
  if (__sanitizer_start_switch_fiber != nullptr) {
    __sanitizer_start_switch_fiber(done_ ? nullptr : &fake_stack_, resumer_stack_,
                                   resumer_stack_bytes_);
  }
  if (tsan_ != nullptr) __tsan_switch_to_fiber(resumer_tsan_, kWithoutSynchronisation);
  cuemu_switch_stack(&stack_pointer_, resumer_stack_pointer_);
  if (__sanitizer_finish_switch_fiber != nullptr) {
    __sanitizer_finish_switch_fiber(fake_stack_, &resumer_stack_, &resumer_stack_bytes_);
  }
}

}  // namespace cuemu
