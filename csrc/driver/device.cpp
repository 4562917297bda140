#include "driver/device.h"

#include <array>
#include <cstdio>
#include <mutex>
#include <stdexcept>

#include "driver/context.h"
#include "driver/error.h"
#include "driver/library.h"

namespace lora_refit::driver {
namespace {

std::string uuid_text(const Uuid& uuid) {
  std::string text = "GPU-";
  for (size_t i = 0; i < sizeof uuid.bytes; ++i) {
    if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    char hex[3];
    std::snprintf(hex, sizeof hex, "%02x", uuid.bytes[i]);
    text += hex;
  }
  return text;
}

template <typename... Parameters, typename... Arguments>
void query(const Api& api, const Call<Parameters...>& call, Arguments... arguments) {
  check(api, call.function(arguments...), call.name, "");
}

}  // namespace

Device::Device(int ordinal) : ordinal_(ordinal) {
  const Api& api = driver::api();
  query(api, api.cuDeviceGet, &number_, ordinal);
  Uuid uuid;
  query(api, api.cuDeviceGetUuid, &uuid, number_);
  uuid_ = uuid_text(uuid);
  std::array<char, 256> name{};
  query(api, api.cuDeviceGetName, name.data(), static_cast<int>(name.size()) - 1, number_);
  name_ = name.data();
  query(api, api.cuDeviceGetAttribute, &major_, kAttributeComputeCapabilityMajor, number_);
  query(api, api.cuDeviceGetAttribute, &minor_, kAttributeComputeCapabilityMinor, number_);
  query(api, api.cuDeviceGetAttribute, &multiprocessors_, kAttributeMultiprocessorCount, number_);
  query(api, api.cuDeviceTotalMem, &memory_bytes_, number_);
}

std::vector<const Device*> Device::list() {
  const Api& api = driver::api();
  int count = 0;
  query(api, api.cuDeviceGetCount, &count);
  std::vector<const Device*> devices;
  for (int ordinal = 0; ordinal < count; ++ordinal) devices.push_back(new Device(ordinal));
  return devices;
}

const std::vector<const Device*>& Device::all() {
  api();  // in a forked child the list below exists, but is of no use
  static const auto& devices = *new std::vector<const Device*>(list());
  return devices;
}

const Device& Device::at(int ordinal) {
  const std::vector<const Device*>& devices = all();
  if (ordinal < 0 || static_cast<size_t>(ordinal) >= devices.size()) {
    throw std::invalid_argument("CUDA device " + std::to_string(ordinal) +
                                " does not exist; there are " + std::to_string(devices.size()));
  }
  return *devices[ordinal];
}

ContextHandle Device::primary_context() const {
  static std::mutex mutex;
  std::lock_guard<std::mutex> lock(mutex);
  if (context_ == nullptr) {
    const Api& api = driver::api();
    check(api, api.cuDevicePrimaryCtxRetain.function(&context_, number_),
          api.cuDevicePrimaryCtxRetain.name, label());
  }
  return context_;
}

bool can_access_peer(const Device& device, const Device& other) {
  const Api& api = driver::api();
  int can = 0;
  check(api, api.cuDeviceCanAccessPeer.function(&can, device.number(), other.number()),
        api.cuDeviceCanAccessPeer.name, device.label());
  return can != 0;
}

void enable_peer_access(const Device& device, const Device& other) {
  const ContextHandle peer = other.primary_context();
  const Context context(device);
  const Result result = context.result_of(&Api::cuCtxEnablePeerAccess, peer, 0u);
  if (result != kErrorPeerAccessAlreadyEnabled) context.check(result, "cuCtxEnablePeerAccess");
}

}  // namespace lora_refit::driver
