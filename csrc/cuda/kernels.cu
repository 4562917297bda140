// All kernels in one translation unit: a fatbin holds one image for each architecture.
#include "cuda/copy.cu"
#include "cuda/digest.cu"
#include "cuda/merge.cu"
