// Work on streams: put off until something waits for it.
#pragma once

#include "call.h"

namespace fakecuda {

// The stream of a handle, of the current device; null is the default stream.
// Throws Refusal(kErrorInvalidHandle).
std::shared_ptr<Stream> stream_at(Device& device, StreamHandle handle);

// Puts a task at the end of the stream, or into the graph that is being captured from it. Tasks
// throw Refusal when they fail; the device is lost then.
void enqueue(Device& device, Stream& stream, Task task);

void run_until(Stream& stream, uint64_t position);
void drain(Stream& stream);
void drain_all(Device& device);

// What a call that synchronises with the default stream does: it, and all that block on it, end.
void drain_default(Device& device);

}  // namespace fakecuda
