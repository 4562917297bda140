// One thread block: a fiber for each CUDA thread, run in turns until all have returned.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "cuemu/async_copy.h"
#include "cuemu/fiber.h"
#include "cuemu/sanitizers.h"
#include "cuemu/shared_memory.h"
#include "cuemu/warp.h"

namespace cuemu {

struct Coordinates {
  unsigned x = 1;
  unsigned y = 1;
  unsigned z = 1;
};

enum class State { kReady, kAtBlockBarrier, kInWarpCollective, kReturned };

struct Thread {
  Coordinates index;
  unsigned number;  // in the block; lane `number % 32` of warp `number / 32`
  State state = State::kReady;
  WarpMeeting meeting;
  AsyncCopies copies;
  std::unique_ptr<Fiber> fiber;
};

class Block {
 public:
  struct Shape {
    Coordinates grid;
    Coordinates block_index;
    Coordinates block;
    size_t dynamic_shared_bytes;
    uint64_t seed;  // 0 runs the threads in order; any other is a random schedule
  };

  // `started` is acquired by every thread, `finished` released by every thread that returns.
  Block(const Shape& shape, const std::function<void()>& kernel, Token& started, Token& finished);
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  ~Block();

  // Runs all threads to their end. Throws Error on a misuse of barriers or collectives, and
  // whatever the kernel throws.
  void run();

  const Shape& shape() const { return shape_; }
  char* dynamic_shared() const { return dynamic_shared_.get(); }
  Thread& thread(unsigned number) { return threads_[number]; }
  unsigned thread_count() const { return static_cast<unsigned>(threads_.size()); }

  // Of the thread that runs now; called from its fiber.
  Thread& current() { return *current_; }
  void barrier();
  void suspend(State state);
  std::string where(const Thread& thread) const;

  // The block that this OS thread runs.
  static Block& running();

 private:
  bool run_ready_threads();
  void release_barrier();

  Shape shape_;
  DynamicShared dynamic_shared_;
  std::vector<Thread> threads_;
  std::vector<unsigned> order_;
  std::mt19937_64 random_;
  Thread* current_ = nullptr;
  std::exception_ptr error_;
  // Of even and odd barriers: with one, a thread that has reached the next barrier would seem to
  // come before a thread that has yet to leave this one.
  std::array<Token, 2> barrier_tokens_;
  unsigned barriers_passed_ = 0;
};

}  // namespace cuemu
