#include "cpu/digest.h"

#include <algorithm>
#include <vector>

#include "cpu/row_kernels.h"
#include "cpu/shared_word.h"
#include "cpu/thread_pool.h"
#include "plan/digest_check.h"

namespace lora_refit {
namespace {

constexpr int64_t kTileChunks = 32;
constexpr int64_t kTileBytes = kTileChunks * kChunkBytes;

struct Digests {
  const uint64_t* addresses;
  const uint64_t* sizes_bytes;
  std::vector<int64_t> first_tile;  // of each buffer, and at the end the number of tiles
  HalvesWeigher weigh;
  uint64_t* out;
};

void digest_tile(void* context, int64_t tile) {
  const Digests& digests = *static_cast<const Digests*>(context);
  const auto after = std::upper_bound(digests.first_tile.begin(), digests.first_tile.end(), tile);
  const int64_t buffer = after - digests.first_tile.begin() - 1;
  const int64_t begin = (tile - digests.first_tile[buffer]) * kTileBytes;
  const int64_t size = static_cast<int64_t>(digests.sizes_bytes[buffer]);
  const std::byte* data = reinterpret_cast<const std::byte*>(digests.addresses[buffer]);
  DigestSum sum;
  for (int64_t at = begin; at < std::min(size, begin + kTileBytes); at += kChunkBytes) {
    const int64_t halves = std::min(kChunkBytes, size - at) / 2;
    sum.add(static_cast<uint64_t>(at / kChunkBytes), digests.weigh(data + at, 0, halves));
  }
  add_relaxed(&digests.out[buffer], sum.value());
}

}  // namespace

void digest_buffers(const uint64_t* addresses, const uint64_t* sizes_bytes, size_t count,
                    uint64_t* out, int threads) {
  Digests digests{addresses, sizes_bytes, {0}, find_halves_weigher(choose_simd()), out};
  digests.first_tile.reserve(count + 1);
  int64_t bytes = 0;
  for (size_t i = 0; i < count; ++i) {
    check_digest_buffer(i, addresses[i], sizes_bytes[i]);
    const int64_t size = static_cast<int64_t>(sizes_bytes[i]);
    digests.first_tile.push_back(digests.first_tile.back() + (size + kTileBytes - 1) / kTileBytes);
    bytes += size;
  }
  std::fill(out, out + count, 0);
  ThreadPool::of_this_process().run(resolve_threads(threads, bytes), digests.first_tile.back(),
                                    digest_tile, &digests);
}

}  // namespace lora_refit
