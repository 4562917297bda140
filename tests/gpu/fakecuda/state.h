// What the stand-in driver knows: devices, memory, streams, and what went wrong.
//
// It is a libcuda.so.1 for machines without a GPU. Device memory is host memory, so its addresses
// are valid in this process; kernels run in the emulator; work on a stream is put off until
// something waits for it, as late as a real GPU may be. It refuses what the driver refuses. Host
// memory that it has never heard of is taken for device memory, so tests may use CPU tensors.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "driver/api.h"

namespace fakecuda {

using namespace lora_refit::driver;

inline constexpr Result kErrorInvalidDevice = 101;
inline constexpr Result kErrorIllegalState = 401;
inline constexpr Result kErrorCaptureInvalidated = 901;
inline constexpr Result kErrorCaptureIsolation = 905;
inline constexpr Result kErrorCapturedEvent = 907;
inline constexpr Result kErrorCaptureWrongThread = 908;

// What an entry point throws to return an error.
struct Refusal {
  Result result;
};
[[noreturn]] inline void refuse(Result result) { throw Refusal{result}; }
inline void require(bool condition, Result otherwise) {
  if (!condition) refuse(otherwise);
}

using Task = std::function<void()>;

struct Graph {
  std::vector<Task> nodes;
};

struct Stream {
  int device;
  bool blocking = false;  // waits for the default stream, and it for this one
  std::list<Task> queue = {};
  uint64_t enqueued = 0;
  uint64_t finished = 0;
  std::unique_ptr<Graph> capture = nullptr;
  pid_t capturing_thread = 0;
  bool capture_invalidated = false;
};

struct Event {
  int device;
  std::shared_ptr<Stream> stream;  // of the last record
  uint64_t position = 0;           // reached once the stream has finished as many tasks
  bool captured = false;
};

struct Device {
  int number;
  std::shared_ptr<Stream> default_stream = nullptr;
  std::set<int> peers = {};  // devices whose memory kernels of this one may use
  Result lost = kSuccess;    // once a kernel has failed, every call returns this
  bool retained = false;
};

struct State {
  std::recursive_mutex mutex;
  pid_t process = 0;  // that initialised, 0 before
  bool shut_down = false;
  bool peer_access = true;
  int sm = 90;
  std::vector<Device> devices;
  std::map<StreamHandle, std::shared_ptr<Stream>> streams;
  std::map<EventHandle, std::unique_ptr<Event>> events;
  std::map<GraphHandle, std::shared_ptr<Graph>> graphs;
  std::map<GraphExecHandle, std::pair<int, std::shared_ptr<Graph>>> executables;
};

State& state();

// A handle that is not a valid address, unlike any other.
template <typename Handle>
Handle new_handle() {
  static uintptr_t next = 0x1000;
  return reinterpret_cast<Handle>(next += 0x10);
}

}  // namespace fakecuda
