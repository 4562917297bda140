#include "driver/stream.h"

namespace lora_refit::driver {
namespace {

Owned<StreamHandle> create_stream(const Device& device) {
  StreamHandle stream = nullptr;
  Context(device).call(&Api::cuStreamCreate, &stream, kStreamNonBlocking);
  return {device, &Api::cuStreamDestroy, stream};
}

Owned<EventHandle> create_event(const Device& device) {
  EventHandle event = nullptr;
  Context(device).call(&Api::cuEventCreate, &event, kEventDisableTiming);
  return {device, &Api::cuEventDestroy, event};
}

Owned<GraphExecHandle> instantiate(const Device& device, GraphHandle captured) {
  GraphExecHandle executable = nullptr;
  Context(device).call(&Api::cuGraphInstantiate, &executable, captured, 0ull);
  return {device, &Api::cuGraphExecDestroy, executable};
}

}  // namespace

Stream::Stream(const Device& device) : stream_(create_stream(device)) {}

void synchronize(const Device& device, StreamHandle stream) {
  Context(device).call(&Api::cuStreamSynchronize, stream);
}

bool is_capturing(const Device& device, StreamHandle stream) {
  int status = kCaptureNone;
  Context(device).call(&Api::cuStreamIsCapturing, stream, &status);
  return status != kCaptureNone;
}

Event::Event(const Device& device) : device_(device), event_(create_event(device)) {}

void Event::record(StreamHandle stream) const {
  Context(device_).call(&Api::cuEventRecord, event_.get(), stream);
}

void Event::synchronize() const { Context(device_).call(&Api::cuEventSynchronize, event_.get()); }

void Event::precede(StreamHandle stream) const {
  Context(device_).call(&Api::cuStreamWaitEvent, stream, event_.get(), 0u);
}

bool Event::done() const {
  const Context context(device_);
  const Result result = context.result_of(&Api::cuEventQuery, event_.get());
  if (result == kErrorNotReady) return false;
  context.check(result, "cuEventQuery");
  return true;
}

void Graph::begin_capture(const Device& device, StreamHandle stream) {
  Context(device).call(&Api::cuStreamBeginCapture, stream, kCaptureThreadLocal);
}

Graph Graph::end_capture(const Device& device, StreamHandle stream) {
  GraphHandle captured = nullptr;
  Context(device).call(&Api::cuStreamEndCapture, stream, &captured);
  const Owned<GraphHandle> graph(device, &Api::cuGraphDestroy, captured);
  return Graph(device, graph.get());
}

Graph::Graph(const Device& device, GraphHandle captured)
    : device_(device), executable_(instantiate(device, captured)) {}

void Graph::launch(StreamHandle stream) const {
  Context(device_).call(&Api::cuGraphLaunch, executable_.get(), stream);
}

}  // namespace lora_refit::driver
