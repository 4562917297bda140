// A box as the CUDA copy kernel reads it.
#pragma once

#include "cuda/kernels.h"
#include "plan/boxes.h"

namespace lora_refit {

inline cuda::CopyTile copy_tile(const Box& box) {
  int32_t variant = cuda::copy_variant(box.src_dtype, box.dst_dtype, box.scaling);
  if (box.block.src == kZeroFill) {
    variant = element_bytes(box.dst_dtype) == 2 ? cuda::kZeroFillVariant2 : cuda::kZeroFillVariant4;
  }
  return {box.block, variant, 0};
}

}  // namespace lora_refit
