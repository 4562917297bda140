// What is inside a fatbin: which GPUs could run it.
#pragma once

namespace fakecuda {

// Throws Refusal: kErrorInvalidImage for anything else than a fatbin, kErrorNoBinaryForGpu where
// neither machine code nor PTX in it fits a GPU of compute capability sm (90 for 9.0).
void require_runnable(const void* image, int sm);

}  // namespace fakecuda
