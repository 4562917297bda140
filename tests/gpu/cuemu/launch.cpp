#include "cuemu/launch.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <exception>
#include <numeric>
#include <thread>
#include <vector>

#include "cuemu/error.h"
#include "cuemu/shared_memory.h"

namespace cuemu {
namespace {

constexpr unsigned kMostThreads = 1024;

// Lets OS threads go one after the other. A bare futex: a mutex would order the blocks' memory
// accesses in ThreadSanitizer's view.
class Turns {
 public:
  void wait_for(unsigned turn) {
    for (unsigned now = turn_.load(); now != turn; now = turn_.load()) futex(FUTEX_WAIT, now);
  }
  void next() {
    turn_.fetch_add(1);
    futex(FUTEX_WAKE, INT_MAX);
  }

 private:
  void futex(int operation, unsigned value) {
    static_assert(sizeof turn_ == sizeof(unsigned));
    syscall(SYS_futex, &turn_, operation | FUTEX_PRIVATE_FLAG, value, nullptr, nullptr, 0);
  }

  std::atomic<unsigned> turn_{0};
};

struct Grid {
  const Launch& launch;
  const std::function<void()>& kernel;
  Token started;
  Token finished;
};

void run_block(Grid& grid, uint64_t number) {
  const Coordinates& size = grid.launch.grid;
  const uint64_t seed = grid.launch.seed == 0 ? 0 : grid.launch.seed * 0x9E3779B97F4A7C15u + number;
  const Coordinates index = {static_cast<unsigned>(number % size.x),
                             static_cast<unsigned>(number / size.x % size.y),
                             static_cast<unsigned>(number / size.x / size.y)};
  Block block({size, index, grid.launch.block, grid.launch.dynamic_shared_bytes, seed}, grid.kernel,
              grid.started, grid.finished);
  block.run();
  grid.finished.acquire();  // before its memory is freed
}

// All OS threads of a wave exist before its first block runs: creating one afterwards would order
// it behind that block.
void run_wave(Grid& grid, const uint64_t* blocks, unsigned count) {
  Turns turns;
  std::vector<std::exception_ptr> errors(count);
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < count; ++i) {
    threads.emplace_back([&, i] {
      poison_static_shared();
      turns.wait_for(i);
      try {
        run_block(grid, blocks[i]);
      } catch (...) {
        errors[i] = std::current_exception();
      }
      turns.next();
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

}  // namespace

void launch(const Launch& launch, const std::function<void()>& kernel) {
  const uint64_t threads = uint64_t{launch.block.x} * launch.block.y * launch.block.z;
  if (threads == 0 || threads > kMostThreads) {
    throw Error("a block of " + std::to_string(threads) + " threads");
  }
  std::vector<uint64_t> blocks(uint64_t{launch.grid.x} * launch.grid.y * launch.grid.z);
  if (blocks.empty()) throw Error("an empty grid");
  std::iota(blocks.begin(), blocks.end(), uint64_t{0});
  std::mt19937_64 random(launch.seed);
  if (launch.seed != 0) std::shuffle(blocks.begin(), blocks.end(), random);

  Grid grid{launch, kernel, {}, {}};
  grid.started.release();
  for (size_t first = 0; first < blocks.size(); first += launch.wave) {
    const size_t count = std::min<size_t>(launch.wave, blocks.size() - first);
    run_wave(grid, blocks.data() + first, static_cast<unsigned>(count));
  }
  grid.finished.acquire();
}

}  // namespace cuemu
