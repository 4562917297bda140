#include "driver/library.h"

#include <dlfcn.h>
#include <unistd.h>

#include <atomic>
#include <mutex>

#include "driver/error.h"

namespace lora_refit::driver {
namespace {

constexpr char kLibrary[] = "libcuda.so.1";

struct Driver {
  Api api;
  pid_t process;  // the one that initialised it
};

// Never destroyed: objects that are still alive at exit may call it.
std::atomic<const Driver*> in_use{nullptr};

template <typename... Parameters>
void resolve(void* library, Call<Parameters...>& call) {
  void* symbol = dlsym(library, call.symbol);
  if (symbol == nullptr) {
    throw Error(std::string(kLibrary) + " has no " + call.symbol +
                ": update the NVIDIA driver, CUDA 11.4 or later is needed");
  }
  call.function = reinterpret_cast<Result (*)(Parameters...)>(symbol);
}

Api load() {
  void* library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    throw Error(std::string("no CUDA driver (") + dlerror() +
                "): install the NVIDIA driver, or keep adapters and slots on the CPU");
  }
  Api api;
#define LORA_REFIT_RESOLVE(name, symbol, ...) resolve(library, api.name);
  LORA_REFIT_DRIVER_CALLS(LORA_REFIT_RESOLVE)
#undef LORA_REFIT_RESOLVE
  return api;
}

const Driver& initialised() {
  static std::mutex mutex;
  std::lock_guard<std::mutex> lock(mutex);
  if (const Driver* driver = in_use.load()) return *driver;
  const Api api = load();
  check(api, api.cuInit.function(0), "cuInit", "");
  int devices = 0;
  check(api, api.cuDeviceGetCount.function(&devices), "cuDeviceGetCount", "");
  if (devices == 0) fail(api, kErrorNoDevice, "cuDeviceGetCount", "");
  const Driver* driver = new Driver{api, getpid()};
  in_use.store(driver);
  return *driver;
}

}  // namespace

const Api& api() {
  const Driver* driver = in_use.load();
  if (driver == nullptr) driver = &initialised();
  const pid_t here = getpid();
  if (driver->process != here) {
    throw Error("process " + std::to_string(here) + " was forked from process " +
                std::to_string(driver->process) +
                ", which uses CUDA; start workers with the spawn method");
  }
  return driver->api;
}

const Api* api_in_use() noexcept {
  const Driver* driver = in_use.load();
  return driver != nullptr && driver->process == getpid() ? &driver->api : nullptr;
}

std::string why_unavailable() {
  try {
    api();
    return "";
  } catch (const Error& error) {
    return error.what();
  }
}

}  // namespace lora_refit::driver
