#include "driver/module.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <stdexcept>

namespace lora_refit::driver {
namespace {

// What nvcc -fatbin writes first. The driver takes an address without a length, so a file that was
// cut short must be found here.
struct FatbinHeader {
  uint32_t magic;
  uint16_t version;
  uint16_t header_bytes;
  uint64_t payload_bytes;
};
constexpr uint32_t kFatbinMagic = 0xBA55ED50u;

constexpr char kNoKernels[] =
    "this build of lora_refit has no CUDA kernels; rebuild it where nvcc is installed, with "
    "LORA_REFIT_CUDA=1";

struct Modules {
  std::mutex mutex;
  std::string image;
  std::map<int, ModuleHandle> by_device;
};

// Never destroyed: kernels may still be in use at exit.
Modules& modules() {
  static Modules& all = *new Modules;
  return all;
}

void check_fatbin(const std::string& image) {
  FatbinHeader header{};
  if (image.size() >= sizeof header) std::memcpy(&header, image.data(), sizeof header);
  if (header.magic != kFatbinMagic) {
    throw std::invalid_argument("the kernel image is not a fatbin; rebuild lora_refit");
  }
  if (header.header_bytes < sizeof header || header.header_bytes > image.size() ||
      header.payload_bytes > image.size() - header.header_bytes) {
    throw std::invalid_argument("the kernel image is cut short: it has " +
                                std::to_string(image.size()) + " bytes; reinstall lora_refit");
  }
}

ModuleHandle module_on(const Device& device) {
  Modules& all = modules();
  std::lock_guard<std::mutex> lock(all.mutex);
  if (all.image.empty()) throw Error(kNoKernels);
  const auto loaded = all.by_device.find(device.ordinal());
  if (loaded != all.by_device.end()) return loaded->second;
  ModuleHandle module = nullptr;
  Context(device).call(&Api::cuModuleLoadData, &module, static_cast<const void*>(all.image.data()));
  all.by_device.emplace(device.ordinal(), module);
  return module;
}

}  // namespace

void set_image(std::string image) {
  check_fatbin(image);
  Modules& all = modules();
  std::lock_guard<std::mutex> lock(all.mutex);
  if (all.image == image) return;
  if (!all.by_device.empty()) {
    throw std::invalid_argument("kernels of another image are loaded already");
  }
  all.image = std::move(image);
}

Kernel::Kernel(const Device& device, const char* name, int threads, size_t dynamic_shared)
    : device_(device), threads_(threads), dynamic_shared_(dynamic_shared) {
  const ModuleHandle module = module_on(device);
  const Context context(device);
  context.call(&Api::cuModuleGetFunction, &function_, module, name);
  context.call(&Api::cuFuncSetAttribute, function_, kFunctionMaxDynamicSharedBytes,
               static_cast<int>(dynamic_shared));
  int blocks = 0;
  context.call(&Api::cuOccupancyMaxActiveBlocksPerMultiprocessor, &blocks, function_, threads,
               dynamic_shared);
  resident_blocks_ = int64_t{std::max(blocks, 1)} * device.multiprocessors();
}

unsigned Kernel::grid(int64_t work, int64_t per_block) const {
  return static_cast<unsigned>(std::min(resident_blocks_, (work + per_block - 1) / per_block));
}

void Kernel::launch(unsigned blocks, const void* arguments, StreamHandle stream) const {
  void* parameters[] = {const_cast<void*>(arguments)};
  const auto threads = static_cast<unsigned>(threads_);
  const auto shared = static_cast<unsigned>(dynamic_shared_);
  Context(device_).call(&Api::cuLaunchKernel, function_, blocks, 1u, 1u, threads, 1u, 1u, shared,
                        stream, static_cast<void**>(parameters), static_cast<void**>(nullptr));
}

}  // namespace lora_refit::driver
