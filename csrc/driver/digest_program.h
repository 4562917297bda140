// Digests of contiguous device buffers: the host's side of cuda/digest.cu.
#pragma once

#include <cstdint>
#include <vector>

#include "cuda/kernels.h"
#include "driver/submission.h"

namespace lora_refit::driver {

class DigestProgram {
 public:
  // Sizes and addresses must be even. Throws std::invalid_argument.
  DigestProgram(const Device& device, const std::vector<uint64_t>& addresses,
                const std::vector<uint64_t>& sizes_bytes);

  // Writes one digest per buffer to `out`, equal to those of the copy that filled the buffers.
  void run(uint64_t* out, StreamHandle stream);

 private:
  std::vector<cuda::DigestBuffer> buffers_;
  Kernel kernel_;
  int64_t chunk_count_;
  DeviceMemory table_;
  Submission submission_;
  cuda::DigestArguments arguments_;
};

// Runs a program for these buffers, kept from an earlier call if there was one: attestation digests
// the same buffers again and again.
void digest_buffers(const Device& device, const std::vector<uint64_t>& addresses,
                    const std::vector<uint64_t>& sizes_bytes, uint64_t* out, StreamHandle stream);

}  // namespace lora_refit::driver
