// A driver object that is given back exactly once.
#pragma once

#include <tuple>
#include <utility>

#include "driver/context.h"

namespace lora_refit::driver {

// `Handle` is what the call that gives the object back takes: most take one value, address ranges
// take their size too. Giving back never throws: after a fork, or at exit once the driver is gone,
// nothing is left to give back, and an object that the driver refuses is lost either way.
template <typename... Handle>
class Owned {
 public:
  using GiveBack = Call<Handle...> Api::*;

  Owned() = default;
  Owned(const Device& device, GiveBack give_back, Handle... handle)
      : device_(&device), give_back_(give_back), handle_(handle...) {}
  Owned(Owned&& other) noexcept { *this = std::move(other); }
  Owned& operator=(Owned&& other) noexcept {
    if (this != &other) {
      close();
      device_ = std::exchange(other.device_, nullptr);
      give_back_ = other.give_back_;
      handle_ = other.handle_;
    }
    return *this;
  }
  ~Owned() { close(); }

  // The address, or the handle.
  auto get() const { return std::get<0>(handle_); }

 private:
  void close() noexcept {
    const Device* device = std::exchange(device_, nullptr);
    if (device == nullptr || api_in_use() == nullptr) return;
    try {
      const Context context(*device);
      std::apply([&](Handle... handle) { context.result_of(give_back_, handle...); }, handle_);
    } catch (const Error&) {
    }
  }

  const Device* device_ = nullptr;
  GiveBack give_back_ = nullptr;
  std::tuple<Handle...> handle_{};
};

}  // namespace lora_refit::driver
