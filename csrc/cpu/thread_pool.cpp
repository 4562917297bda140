#include "cpu/thread_pool.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <stdexcept>
#include <string>

namespace lora_refit {
namespace {

constexpr int kMostDefaultThreads = 8;

// Below this, waking a thread costs more than it saves.
constexpr int64_t kBytesWorthAThread = 512 * 1024;

int threads_from_environment(const std::string& text) {
  char* end = nullptr;
  const long value = std::strtol(text.c_str(), &end, 10);
  if (text.empty() || *end != '\0' || value < 1 || value > kMostThreads) {
    throw std::runtime_error("LORA_REFIT_THREADS=" + text + " must be a number from 1 to " +
                             std::to_string(kMostThreads));
  }
  return static_cast<int>(value);
}

int cpus_in_affinity_mask() {
  cpu_set_t mask;
  CPU_ZERO(&mask);
  if (sched_getaffinity(0, sizeof mask, &mask) != 0) return 1;
  return std::max(1, CPU_COUNT(&mask));
}

}  // namespace

int default_threads() {
  const char* variable = std::getenv("LORA_REFIT_THREADS");
  if (variable != nullptr) return threads_from_environment(variable);
  return std::min(kMostDefaultThreads, cpus_in_affinity_mask());
}

int resolve_threads(int threads, int64_t bytes) {
  if (threads < 0 || threads > kMostThreads) {
    throw std::invalid_argument("threads=" + std::to_string(threads) + " must be from 0 to " +
                                std::to_string(kMostThreads));
  }
  if (threads > 0) return threads;
  return bytes < kBytesWorthAThread ? 1 : default_threads();
}

// Pools are never destroyed: at exit their threads sleep, and after a fork the parent's pool names
// threads that do not exist in the child and may hold locks that nobody will release.
ThreadPool& ThreadPool::of_this_process() {
  static std::atomic<ThreadPool*> current{nullptr};
  const pid_t self = getpid();
  ThreadPool* pool = current.load(std::memory_order_acquire);
  while (pool == nullptr || pool->owner_ != self) {
    ThreadPool* fresh = new ThreadPool(self);
    if (current.compare_exchange_strong(pool, fresh, std::memory_order_acq_rel)) return *fresh;
    delete fresh;
  }
  return *pool;
}

void ThreadPool::run(int threads, int64_t count, IndexedTask task, void* context) {
  Job job{task, context, count};
  const int helpers = static_cast<int>(std::min<int64_t>(threads, count)) - 1;
  if (helpers < 1) {
    work(job);
    return;
  }
  std::lock_guard<std::mutex> one_run(one_run_);
  start_helpers(helpers);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    job_ = &job;
    invited_ = busy_ = helpers;
    ++generation_;
  }
  job_posted_.notify_all();
  work(job);
  std::unique_lock<std::mutex> lock(mutex_);
  helpers_done_.wait(lock, [this] { return busy_ == 0; });
}

void ThreadPool::start_helpers(int wanted) {
  while (static_cast<int>(helpers_.size()) < wanted) {
    const int number = static_cast<int>(helpers_.size());
    helpers_.emplace_back(&ThreadPool::help, this, number);
  }
}

void ThreadPool::help(int number) {
  uint64_t seen = 0;
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    job_posted_.wait(lock, [&] { return generation_ != seen; });
    seen = generation_;
    if (number >= invited_) continue;
    Job& job = *job_;
    lock.unlock();
    work(job);
    lock.lock();
    if (--busy_ == 0) helpers_done_.notify_one();
  }
}

void ThreadPool::work(Job& job) {
  for (;;) {
    const int64_t index = job.next.fetch_add(1, std::memory_order_relaxed);
    if (index >= job.count) return;
    job.task(job.context, index);
  }
}

}  // namespace lora_refit
