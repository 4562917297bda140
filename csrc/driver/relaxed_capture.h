// Lets this thread wait and free while it captures a stream: otherwise the driver refuses, since a
// careless caller could wait for what is only being captured. What we wait for was submitted.
#pragma once

#include "driver/context.h"

namespace lora_refit::driver {

class RelaxedCapture {
 public:
  explicit RelaxedCapture(const Context& context) : context_(context) { exchange(); }
  ~RelaxedCapture() { exchange(); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  void exchange() { context_.result_of(&Api::cuThreadExchangeStreamCaptureMode, &mode_); }

  const Context& context_;
  int mode_ = kCaptureRelaxed;  // then the thread's own
};

}  // namespace lora_refit::driver
