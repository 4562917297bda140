// Only the CUDA backend of lora_refit._C, quick to build for mutants of it.
#include "cuda_bindings.h"

PYBIND11_MODULE(_C, module) { lora_refit::bind_cuda(module); }
