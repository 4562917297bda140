// Streams, events, capture and graphs.
#include "stream.h"

#include <unistd.h>

namespace fakecuda {
namespace {

void run_one(Stream& stream) {
  const Task task = std::move(stream.queue.front());
  stream.queue.pop_front();
  ++stream.finished;
  Device& device = state().devices[stream.device];
  if (device.lost != kSuccess) return;
  try {
    task();
  } catch (const Refusal& refusal) {
    device.lost = refusal.result;
  }
}

void require_alive(const Device& device) { require(device.lost == kSuccess, device.lost); }

Event& event_at(Device& device, EventHandle handle) {
  const auto found = state().events.find(handle);
  require(found != state().events.end() && found->second->device == device.number,
          kErrorInvalidHandle);
  return *found->second;
}

// A captured event cannot be waited for, and nothing can be while this thread captures.
Event& waitable(Device& device, EventHandle handle) {
  Event& event = event_at(device, handle);
  require(!event.captured, kErrorCapturedEvent);
  require_no_capture();
  return event;
}

void require_not_captured(Stream& stream) {
  if (stream.capture == nullptr) return;
  stream.capture_invalidated = true;
  refuse(kErrorStreamCaptureUnsupported);
}

}  // namespace

std::shared_ptr<Stream> stream_at(Device& device, StreamHandle handle) {
  if (handle == nullptr) return device.default_stream;
  const auto found = state().streams.find(handle);
  require(found != state().streams.end() && found->second->device == device.number,
          kErrorInvalidHandle);
  return found->second;
}

void enqueue(Device& device, Stream& stream, Task task) {
  require_alive(device);
  if (stream.capture != nullptr) {
    require(!stream.capture_invalidated, kErrorCaptureInvalidated);
    stream.capture->nodes.push_back(std::move(task));
    return;
  }
  stream.queue.push_back(std::move(task));
  ++stream.enqueued;
}

void run_until(Stream& stream, uint64_t position) {
  while (stream.finished < position) run_one(stream);
  require_alive(state().devices[stream.device]);
}

void drain(Stream& stream) { run_until(stream, stream.enqueued); }

void drain_all(Device& device) {
  drain(*device.default_stream);
  for (auto& [handle, stream] : state().streams) {
    if (stream->device == device.number) drain(*stream);
  }
}

void drain_default(Device& device) {
  for (auto& [handle, stream] : state().streams) {
    if (stream->device == device.number && stream->blocking) drain(*stream);
  }
  drain(*device.default_stream);
}

}  // namespace fakecuda

using namespace fakecuda;

FAKECUDA_ENTRY cuStreamCreate(StreamHandle* handle, unsigned flags) {
  return call_in_context("cuStreamCreate", [&](Device& device) {
    require(flags <= kStreamNonBlocking, kErrorInvalidValue);
    auto stream = std::make_shared<Stream>(Stream{device.number});
    stream->blocking = flags != kStreamNonBlocking;
    *handle = new_handle<StreamHandle>();
    state().streams[*handle] = std::move(stream);
  });
}

FAKECUDA_ENTRY cuStreamDestroy_v2(StreamHandle handle) {
  return call_in_context("cuStreamDestroy", [&](Device& device) {
    require(handle != nullptr, kErrorInvalidHandle);
    const auto stream = stream_at(device, handle);
    state().streams.erase(handle);
    drain(*stream);
  });
}

FAKECUDA_ENTRY cuStreamSynchronize(StreamHandle handle) {
  return call_in_context("cuStreamSynchronize", [&](Device& device) {
    const auto stream = stream_at(device, handle);
    require_not_captured(*stream);
    if (handle == nullptr) {
      require_no_capture();
      drain_default(device);
    } else {
      drain(*stream);
    }
  });
}

FAKECUDA_ENTRY cuStreamIsCapturing(StreamHandle handle, int* status) {
  return call_in_context("cuStreamIsCapturing", [&](Device& device) {
    const auto stream = stream_at(device, handle);
    *status = stream->capture == nullptr ? kCaptureNone : 1 + int{stream->capture_invalidated};
  });
}

FAKECUDA_ENTRY cuStreamBeginCapture_v2(StreamHandle handle, int mode) {
  return call_in_context("cuStreamBeginCapture", [&](Device& device) {
    const auto stream = stream_at(device, handle);
    require(mode == kCaptureThreadLocal, kErrorInvalidValue);  // the only one modelled here
    require(handle != nullptr, kErrorStreamCaptureUnsupported);
    require(stream->capture == nullptr, kErrorIllegalState);
    stream->capture = std::make_unique<Graph>();
    stream->capturing_thread = gettid();
    stream->capture_invalidated = false;
  });
}

FAKECUDA_ENTRY cuThreadExchangeStreamCaptureMode(int* mode) {
  return call("cuThreadExchangeStreamCaptureMode", [&] {
    require(*mode >= 0 && *mode <= kCaptureRelaxed, kErrorInvalidValue);
    std::swap(*mode, capture_mode());
  });
}

FAKECUDA_ENTRY cuStreamEndCapture(StreamHandle handle, GraphHandle* graph) {
  return call_in_context("cuStreamEndCapture", [&](Device& device) {
    const auto stream = stream_at(device, handle);
    *graph = nullptr;
    require(stream->capture != nullptr, kErrorIllegalState);
    require(stream->capturing_thread == gettid(), kErrorCaptureWrongThread);
    const std::shared_ptr<Graph> captured = std::move(stream->capture);
    require(!stream->capture_invalidated, kErrorCaptureInvalidated);
    *graph = new_handle<GraphHandle>();
    state().graphs[*graph] = captured;
  });
}

FAKECUDA_ENTRY cuStreamWaitEvent(StreamHandle handle, EventHandle event_handle, unsigned flags) {
  return call_in_context("cuStreamWaitEvent", [&](Device& device) {
    require(flags == 0, kErrorInvalidValue);
    const auto stream = stream_at(device, handle);
    const Event& event = event_at(device, event_handle);
    require(event.captured == (stream->capture != nullptr), kErrorCaptureIsolation);
    if (event.stream == nullptr) return;
    enqueue(device, *stream,
            [waited = event.stream, position = event.position] { run_until(*waited, position); });
  });
}

FAKECUDA_ENTRY cuEventCreate(EventHandle* handle, unsigned flags) {
  return call_in_context("cuEventCreate", [&](Device& device) {
    require(flags <= 3, kErrorInvalidValue);
    *handle = new_handle<EventHandle>();
    state().events[*handle] = std::make_unique<Event>(Event{device.number, nullptr});
  });
}

FAKECUDA_ENTRY cuEventDestroy_v2(EventHandle handle) {
  return call_in_context("cuEventDestroy", [&](Device& device) {
    event_at(device, handle);
    state().events.erase(handle);
  });
}

FAKECUDA_ENTRY cuEventRecord(EventHandle handle, StreamHandle stream_handle) {
  return call_in_context("cuEventRecord", [&](Device& device) {
    Event& event = event_at(device, handle);
    event.stream = stream_at(device, stream_handle);
    event.captured = event.stream->capture != nullptr;
    enqueue(device, *event.stream, [] {});
    event.position = event.stream->enqueued;
  });
}

// Each query lets the device get one step further.
FAKECUDA_ENTRY cuEventQuery(EventHandle handle) {
  return call_in_context("cuEventQuery", [&](Device& device) {
    const Event& event = waitable(device, handle);
    if (event.stream == nullptr || event.stream->finished >= event.position) return;
    run_one(*event.stream);
    require_alive(device);
    refuse(kErrorNotReady);
  });
}

FAKECUDA_ENTRY cuEventSynchronize(EventHandle handle) {
  return call_in_context("cuEventSynchronize", [&](Device& device) {
    const Event& event = waitable(device, handle);
    if (event.stream != nullptr) run_until(*event.stream, event.position);
  });
}

FAKECUDA_ENTRY cuGraphInstantiateWithFlags(GraphExecHandle* handle, GraphHandle graph,
                                           unsigned long long flags) {
  return call_in_context("cuGraphInstantiate", [&](Device& device) {
    const auto found = state().graphs.find(graph);
    require(found != state().graphs.end(), kErrorInvalidHandle);
    require(flags == 0, kErrorInvalidValue);
    *handle = new_handle<GraphExecHandle>();
    state().executables[*handle] = {device.number, found->second};
  });
}

FAKECUDA_ENTRY cuGraphLaunch(GraphExecHandle handle, StreamHandle stream_handle) {
  return call_in_context("cuGraphLaunch", [&](Device& device) {
    const auto found = state().executables.find(handle);
    require(found != state().executables.end() && found->second.first == device.number,
            kErrorInvalidHandle);
    const auto stream = stream_at(device, stream_handle);
    for (const Task& task : found->second.second->nodes) enqueue(device, *stream, task);
  });
}

FAKECUDA_ENTRY cuGraphExecDestroy(GraphExecHandle handle) {
  return call_in_context("cuGraphExecDestroy", [&](Device&) {
    require(state().executables.erase(handle) == 1, kErrorInvalidHandle);
  });
}

FAKECUDA_ENTRY cuGraphDestroy(GraphHandle handle) {
  return call_in_context("cuGraphDestroy", [&](Device&) {
    require(state().graphs.erase(handle) == 1, kErrorInvalidHandle);
  });
}
