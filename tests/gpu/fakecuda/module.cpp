// Modules, functions and launches.
#include <exception>
#include <string>
#include <vector>

#include "address_space.h"
#include "control.h"
#include "cuemu/launch.h"
#include "device_facts.h"
#include "fatbin.h"
#include "kernels.h"
#include "stream.h"

namespace fakecuda {
namespace {

struct Function {
  int device;
  const Kernel* kernel;
  size_t dynamic_shared_most = kSharedBytesDefault;
};

std::map<ModuleHandle, int>& modules() {  // and their devices
  static auto& all = *new std::map<ModuleHandle, int>;
  return all;
}

std::map<FunctionHandle, Function>& functions() {
  static auto& all = *new std::map<FunctionHandle, Function>;
  return all;
}

Function& function_at(const Device& device, FunctionHandle handle) {
  const auto found = functions().find(handle);
  require(found != functions().end() && found->second.device == device.number, kErrorInvalidHandle);
  return found->second;
}

struct Launch {
  const Kernel* kernel;
  unsigned blocks;
  unsigned threads;
  size_t dynamic_shared;
  std::vector<char> arguments;
};

void execute(const Device& device, const Launch& launch) {
  launch.kernel->visit(launch.arguments.data(), [&](uint64_t address, int64_t bytes) {
    address_space().check_access(device, address, static_cast<size_t>(bytes));
  });
  try {
    cuemu::Launch shape{{launch.blocks}, {launch.threads}};
    shape.dynamic_shared_bytes = launch.dynamic_shared;
    cuemu::launch(shape, [&] { launch.kernel->run(launch.arguments.data()); });
  } catch (const std::exception& error) {
    control().last_error = error.what();
    refuse(kErrorLaunchFailed);
  }
}

}  // namespace
}  // namespace fakecuda

using namespace fakecuda;

FAKECUDA_ENTRY cuModuleLoadData(ModuleHandle* module, const void* image) {
  return call_in_context("cuModuleLoadData", [&](Device& device) {
    require_no_capture();
    require_runnable(image, state().sm);
    *module = new_handle<ModuleHandle>();
    modules()[*module] = device.number;
  });
}

FAKECUDA_ENTRY cuModuleGetFunction(FunctionHandle* function, ModuleHandle module,
                                   const char* name) {
  return call_in_context("cuModuleGetFunction", [&](Device& device) {
    const auto found = modules().find(module);
    require(found != modules().end() && found->second == device.number, kErrorInvalidHandle);
    const Kernel* kernel = find_kernel(name);
    require(kernel != nullptr, kErrorNotFound);
    *function = new_handle<FunctionHandle>();
    functions()[*function] = Function{device.number, kernel};
  });
}

FAKECUDA_ENTRY cuFuncSetAttribute(FunctionHandle handle, int attribute, int value) {
  return call_in_context("cuFuncSetAttribute", [&](Device& device) {
    Function& function = function_at(device, handle);
    require(attribute == kFunctionMaxDynamicSharedBytes, kErrorInvalidValue);
    require(value >= 0 && value <= kSharedBytesMost, kErrorInvalidValue);
    function.dynamic_shared_most = static_cast<size_t>(value);
  });
}

FAKECUDA_ENTRY cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, FunctionHandle handle,
                                                           int threads, size_t dynamic_shared) {
  return call_in_context("cuOccupancyMaxActiveBlocksPerMultiprocessor", [&](Device& device) {
    function_at(device, handle);
    require(threads > 0 && threads <= 1024, kErrorInvalidValue);
    *blocks = dynamic_shared <= kSharedBytesMost ? 1 : 0;
  });
}

FAKECUDA_ENTRY cuLaunchKernel(FunctionHandle handle, unsigned blocks, unsigned blocks_y,
                              unsigned blocks_z, unsigned threads, unsigned threads_y,
                              unsigned threads_z, unsigned dynamic_shared,
                              StreamHandle stream_handle, void** parameters, void** extra) {
  return call_in_context("cuLaunchKernel", [&](Device& device) {
    const Function& function = function_at(device, handle);
    const auto stream = stream_at(device, stream_handle);
    require(blocks > 0 && blocks_y == 1 && blocks_z == 1, kErrorInvalidValue);
    require(threads > 0 && threads <= 1024 && threads_y == 1 && threads_z == 1, kErrorInvalidValue);
    require(parameters != nullptr && extra == nullptr, kErrorInvalidValue);
    require(dynamic_shared <= function.dynamic_shared_most, kErrorInvalidValue);
    const char* argument = static_cast<const char*>(parameters[0]);
    const Launch launch{function.kernel,
                        blocks,
                        threads,
                        dynamic_shared,
                        {argument, argument + function.kernel->argument_bytes}};
    enqueue(device, *stream, [&device, launch] { execute(device, launch); });
  });
}
