#include "cuemu/block.h"

#include <algorithm>
#include <numeric>

#include "cuemu/error.h"

namespace cuemu {
namespace {

thread_local Block* running_block = nullptr;

}  // namespace

Block& Block::running() {
  if (running_block == nullptr) throw Error("CUDA code runs outside a launch");
  return *running_block;
}

Block::Block(const Shape& shape, const std::function<void()>& kernel, Token& started,
             Token& finished)
    : shape_(shape),
      dynamic_shared_(allocate_dynamic_shared(shape.dynamic_shared_bytes)),
      threads_(shape.block.x * shape.block.y * shape.block.z),
      order_(threads_.size()),
      random_(shape.seed) {
  std::iota(order_.begin(), order_.end(), 0u);
  for (unsigned number = 0; number < threads_.size(); ++number) {
    Thread& thread = threads_[number];
    thread.number = number;
    thread.index = {number % shape.block.x, number / shape.block.x % shape.block.y,
                    number / (shape.block.x * shape.block.y)};
    thread.fiber = std::make_unique<Fiber>([this, &thread, &kernel, &started, &finished] {
      started.acquire();
      try {
        kernel();
      } catch (...) {
        error_ = std::current_exception();
      }
      thread.state = State::kReturned;
      finished.release();
    });
  }
  running_block = this;
}

Block::~Block() { running_block = nullptr; }

void Block::run() {
  for (;;) {
    if (run_ready_threads()) continue;
    const auto returned = std::count_if(threads_.begin(), threads_.end(), [](const Thread& thread) {
      return thread.state == State::kReturned;
    });
    if (returned == thread_count()) return;
    for (const Thread& thread : threads_) {
      if (thread.state == State::kInWarpCollective) {
        throw Error(std::string(thread.meeting.operation) + " never completes: " + where(thread));
      }
    }
    if (returned > 0) {
      throw Error("__syncthreads waits for threads that have returned: block of " +
                  where(threads_[0]));
    }
    release_barrier();
  }
}

bool Block::run_ready_threads() {
  if (shape_.seed != 0) std::shuffle(order_.begin(), order_.end(), random_);
  bool any = false;
  for (unsigned number : order_) {
    Thread& thread = threads_[number];
    if (thread.state != State::kReady) continue;
    any = true;
    current_ = &thread;
    thread.fiber->resume();
    if (error_) std::rethrow_exception(error_);
  }
  return any;
}

void Block::release_barrier() {
  for (Thread& thread : threads_) thread.state = State::kReady;
  ++barriers_passed_;
}

void Block::barrier() {
  Token& token = barrier_tokens_[barriers_passed_ % 2];
  token.release();
  suspend(State::kAtBlockBarrier);
  token.acquire();
}

void Block::suspend(State state) {
  current_->state = state;
  current_->fiber->suspend();
}

std::string Block::where(const Thread& thread) const {
  const Coordinates& at = shape_.block_index;
  return "block (" + std::to_string(at.x) + ", " + std::to_string(at.y) + ", " +
         std::to_string(at.z) + "), thread " + std::to_string(thread.number);
}

}  // namespace cuemu
