// A function with a stack of its own, resumed and suspended by hand. x86-64, System V.
#pragma once

#include <cstddef>
#include <functional>

namespace cuemu {

class Fiber {
 public:
  explicit Fiber(std::function<void()> body);
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // Runs the body until it suspends or returns. The body must not throw.
  void resume();

  // Returns to the `resume` that runs this fiber; called from its body.
  void suspend();

  bool done() const { return done_; }

 private:
  static void enter();

  std::function<void()> body_;
  bool done_ = false;
  void* stack_;
  void* stack_pointer_;
  void* resumer_stack_pointer_ = nullptr;

  // The sanitizers' view of this fiber and of the stack that resumed it.
  void* fake_stack_ = nullptr;
  void* resumer_fake_stack_ = nullptr;
  const void* resumer_stack_ = nullptr;
  size_t resumer_stack_bytes_ = 0;
  void* tsan_ = nullptr;
  void* resumer_tsan_ = nullptr;
};

}  // namespace cuemu
