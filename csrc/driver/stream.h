// Streams, events and captured graphs. Streams of torch arrive as handles; 0 is the default stream.
#pragma once

#include "driver/owned.h"

namespace lora_refit::driver {

class Stream {
 public:
  // Does not wait for the default stream, nor it for this one.
  explicit Stream(const Device& device);

  StreamHandle handle() const { return stream_.get(); }

 private:
  Owned<StreamHandle> stream_;
};

void synchronize(const Device& device, StreamHandle stream);
bool is_capturing(const Device& device, StreamHandle stream);

// Marks a point of a stream's work.
class Event {
 public:
  explicit Event(const Device& device);

  void record(StreamHandle stream) const;
  void synchronize() const;                 // blocks the host until the last record is reached
  void precede(StreamHandle stream) const;  // blocks later work of `stream` instead
  bool done() const;

 private:
  const Device& device_;
  Owned<EventHandle> event_;
};

// Work captured from a stream, ready to be replayed.
class Graph {
 public:
  // Only calls of this thread that touch the stream are captured or refused meanwhile.
  static void begin_capture(const Device& device, StreamHandle stream);
  static Graph end_capture(const Device& device, StreamHandle stream);

  void launch(StreamHandle stream) const;

 private:
  Graph(const Device& device, GraphHandle captured);

  const Device& device_;
  Owned<GraphExecHandle> executable_;
};

}  // namespace lora_refit::driver
