// What the runs of every program have in common: addresses go up, results are zeroed, one kernel
// runs, results come down.
#pragma once

#include <cstddef>
#include <mutex>
#include <vector>

#include "driver/address_table.h"
#include "driver/module.h"
#include "driver/results.h"
#include "driver/stream.h"

namespace lora_refit::driver {

// A launch, the same each time. Without blocks nothing is launched.
struct Work {
  const Kernel& kernel;
  unsigned blocks;
  const void* arguments;
};

// A part of the results, and where the caller wants it.
struct Output {
  void* data;
  size_t bytes;
};

// Runs of one submission follow each other on the device, on whatever streams; calls from several
// threads take turns.
class Submission {
 public:
  Submission(const Device& device, size_t source_count, size_t destination_count,
             size_t result_bytes);
  ~Submission();

  const AddressTable& addresses() const { return addresses_; }
  DeviceAddress results() const { return results_.address(); }

  // Throws std::invalid_argument while the stream is capturing, unless a run with the same
  // addresses came before and its results were collected.
  void launch(const Work& work, const Addresses& addresses, StreamHandle stream);

  // Waits for the last launch that was not captured; then the results are the device's last.
  // Whoever replays a captured launch waits for it first. Outputs are the parts, in order.
  void collect(const std::vector<Output>& outputs);

  // Both, with no other thread's run in between.
  void run(const Work& work, const Addresses& addresses, StreamHandle stream,
           const std::vector<Output>& outputs);

 private:
  void capture(const Work& work, const Addresses& addresses, StreamHandle stream);
  void submit(const Work& work, const Addresses& addresses, StreamHandle stream);
  void enqueue(const Work& work, StreamHandle stream);
  void abandon(StreamHandle stream) noexcept;
  void wait();
  void read(const std::vector<Output>& outputs);

  const Device& device_;
  std::mutex mutex_;
  bool in_flight_ = false;
  bool has_results_ = false;
  AddressTable addresses_;
  Results results_;
  Event finished_;
};

}  // namespace lora_refit::driver
