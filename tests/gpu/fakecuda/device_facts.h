// What all devices of the stand-in are like: small, so that the emulator is quick.
#pragma once

#include <cstddef>

#include "driver/api.h"

namespace fakecuda {

inline constexpr int kMultiprocessors = 2;
inline constexpr size_t kMemoryBytes = size_t{8} << 30;
inline constexpr size_t kGranularity = size_t{2} << 20;
inline constexpr size_t kSharedBytesPerMultiprocessor = 228 << 10;
inline constexpr int kSharedBytesDefault = 48 << 10;
inline constexpr int kSharedBytesMost = 227 << 10;  // per block, if a kernel asks for it

lora_refit::driver::Uuid uuid_of(int device);

}  // namespace fakecuda
