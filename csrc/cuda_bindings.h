// The Python module lora_refit._C.cuda.
#pragma once

#include <pybind11/pybind11.h>

namespace lora_refit {

// Adds the submodule. Nothing looks for a driver before one of its functions is called.
void bind_cuda(pybind11::module_& module);

}  // namespace lora_refit
