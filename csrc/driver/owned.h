// A driver object that is given back exactly once.
#pragma once

#include <tuple>
#include <utility>

#include "driver/context.h"
#include "driver/relaxed_capture.h"

namespace lora_refit::driver {

// `Handle` is what the call that gives the object back takes: most take one value, address ranges
// take their size too. Giving back never throws: after a fork, or at exit once the driver is gone,
// nothing is left to give back, and an object that the driver refuses is lost either way.
template <typename... Handle>
class Owned {
 public:
  using GiveBack = Call<Handle...> Api::*;

  Owned(const Device& device, GiveBack give_back, Handle... handle)
      : device_(&device), give_back_(give_back), handle_(handle...) {}
  Owned(Owned&& other) noexcept
      : device_(std::exchange(other.device_, nullptr)),
        give_back_(other.give_back_),
        handle_(other.handle_) {}
  ~Owned() { give_back(); }

  // The address, or the handle.
  auto get() const { return std::get<0>(handle_); }

 private:
  void give_back() noexcept {
    if (device_ == nullptr || api_in_use() == nullptr) return;
    try {
      const Context context(*device_);
      const RelaxedCapture relaxed(context);
      std::apply([&](Handle... handle) { context.result_of(give_back_, handle...); }, handle_);
    } catch (const Error&) {
    }
  }

  const Device* device_;  // null once moved from
  GiveBack give_back_;
  std::tuple<Handle...> handle_;
};

}  // namespace lora_refit::driver
