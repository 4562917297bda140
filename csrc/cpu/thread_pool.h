// A thread pool of our own: torch ships its own OpenMP runtime, and trainers fork.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace lora_refit {

// Called with the numbers 0, 1, ... count-1, each once, on any of the threads.
using IndexedTask = void (*)(void* context, int64_t index);

inline constexpr int kMostThreads = 64;

// CPUs in the affinity mask, at most 8; LORA_REFIT_THREADS in the environment overrides it.
// Throws std::runtime_error when that is not a number from 1 to kMostThreads.
int default_threads();

// The number of threads for a call that asked for `threads` (0: the default, and one thread where
// `bytes` of memory traffic are too few to share). Throws std::invalid_argument.
int resolve_threads(int threads, int64_t bytes);

class ThreadPool {
 public:
  // This process's pool. A forked child has none of its parent's threads, so it gets a new pool.
  static ThreadPool& of_this_process();

  // Runs the task on up to `threads` threads, the caller among them, and returns when all of it is
  // done. Calls from several threads run one after the other.
  void run(int threads, int64_t count, IndexedTask task, void* context);

 private:
  struct Job {
    IndexedTask task;
    void* context;
    int64_t count;
    std::atomic<int64_t> next{0};
  };

  explicit ThreadPool(pid_t owner) : owner_(owner) {}
  void start_helpers(int wanted);
  void help(int number);
  static void work(Job& job);

  const pid_t owner_;
  std::mutex one_run_;
  std::mutex mutex_;
  std::condition_variable job_posted_;
  std::condition_variable helpers_done_;
  std::vector<std::thread> helpers_;
  Job* job_ = nullptr;
  uint64_t generation_ = 0;
  int invited_ = 0;  // helpers that take part in the current job
  int busy_ = 0;     // of them, those that have not finished
};

}  // namespace lora_refit
