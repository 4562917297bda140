#include "driver/submission.h"

#include <cstring>
#include <stdexcept>

#include "driver/relaxed_capture.h"

namespace lora_refit::driver {

Submission::Submission(const Device& device, size_t source_count, size_t destination_count,
                       size_t result_bytes)
    : device_(device),
      addresses_(device, source_count, destination_count),
      results_(device, result_bytes),
      finished_(device) {}

Submission::~Submission() {
  if (api_in_use() == nullptr) return;
  try {
    const Context context(device_);
    const RelaxedCapture relaxed(context);
    wait();
  } catch (const Error&) {
    // The context is lost, and with it the launch that still used this memory.
  }
}

void Submission::launch(const Work& work, const Addresses& addresses, StreamHandle stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  const Context context(device_);
  if (is_capturing(device_, stream)) {
    capture(work, addresses, stream);
  } else {
    submit(work, addresses, stream);
  }
}

void Submission::collect(const std::vector<Output>& outputs) {
  std::lock_guard<std::mutex> lock(mutex_);
  const Context context(device_);
  read(outputs);
}

void Submission::run(const Work& work, const Addresses& addresses, StreamHandle stream,
                     const std::vector<Output>& outputs) {
  std::lock_guard<std::mutex> lock(mutex_);
  const Context context(device_);
  if (is_capturing(device_, stream)) {
    throw std::invalid_argument(
        "run() waits, which a capturing stream cannot: capture launch() instead");
  }
  submit(work, addresses, stream);
  read(outputs);
}

void Submission::capture(const Work& work, const Addresses& addresses, StreamHandle stream) {
  if (!addresses_.holds(addresses)) {
    throw std::invalid_argument(
        "addresses changed since the last run, and a capturing stream cannot upload them: run once "
        "before capturing");
  }
  if (in_flight_) {
    throw std::invalid_argument("collect the last launch before capturing another");
  }
  enqueue(work, stream);
}

void Submission::submit(const Work& work, const Addresses& addresses, StreamHandle stream) {
  const bool moved = !addresses_.holds(addresses);
  if (moved) {
    wait();  // an upload that is under way reads the host's copy of the table
  } else if (in_flight_) {
    finished_.precede(stream);
  }
  try {
    if (moved) addresses_.upload(addresses, stream);
    enqueue(work, stream);
    finished_.record(stream);
  } catch (const Error&) {
    abandon(stream);
    throw;
  }
  in_flight_ = true;
  has_results_ = true;
}

void Submission::enqueue(const Work& work, StreamHandle stream) {
  results_.zero(stream);
  if (work.blocks > 0) work.kernel.launch(work.blocks, work.arguments, stream);
  results_.fetch(stream);
}

// Half a submission may be under way: nothing of it may outlive the error.
void Submission::abandon(StreamHandle stream) noexcept {
  addresses_.forget();
  in_flight_ = false;
  has_results_ = false;
  try {
    synchronize(device_, stream);
  } catch (const Error&) {
    // The first error is the one to report.
  }
}

void Submission::wait() {
  if (!in_flight_) return;
  finished_.synchronize();
  in_flight_ = false;
}

void Submission::read(const std::vector<Output>& outputs) {
  if (!has_results_) throw std::invalid_argument("there is no launch to collect");
  wait();
  const char* result = static_cast<const char*>(results_.on_host());
  for (const Output& output : outputs) {
    if (output.bytes > 0) std::memcpy(output.data, result, output.bytes);
    result += output.bytes;
  }
}

}  // namespace lora_refit::driver
