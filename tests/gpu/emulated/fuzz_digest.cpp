// Digests random buffers with the digest kernel on the emulator, each time with a random schedule,
// and compares with the CPU's. Arguments: the first seed, and how many.
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <stdexcept>
#include <vector>

#include "cpu/digest.h"
#include "cuda/kernels.h"
#include "cuemu/launch.h"
#include "emulated/buffers.h"

extern "C" void lora_refit_digest(lora_refit::cuda::DigestArguments arguments);

namespace lora_refit::testing {
namespace {

std::vector<Buffer> random_buffers(Random& random) {
  std::vector<Buffer> buffers;
  const int64_t count = random.one_of({0, 1, 2, 7, 40});
  for (int64_t i = 0; i < count; ++i) {
    const int64_t chunks = random.one_of({0, 0, 1, 1, 2, 9});
    const int64_t rest = random.one_of({0, 0, 2, 4, 16, 30, 514, 4094});
    buffers.emplace_back(chunks * kChunkBytes + rest, random.one_of({0, 0, 2, 4, 8, 14}));
    fill_with_values(random, DType::kF16, buffers.back());
  }
  return buffers;
}

void check_digest(uint64_t seed) {
  Random random(seed);
  const std::vector<Buffer> buffers = random_buffers(random);
  std::vector<cuda::DigestBuffer> table;
  std::vector<uint64_t> sizes;
  int64_t chunks = 0;
  for (const Buffer& buffer : buffers) {
    table.push_back({buffer.address(), buffer.bytes(), chunks});
    sizes.push_back(static_cast<uint64_t>(buffer.bytes()));
    chunks += (buffer.bytes() + kChunkBytes - 1) / kChunkBytes;
  }

  std::vector<uint64_t> digests(buffers.size());
  const cuda::DigestArguments arguments = {table.data(), static_cast<int64_t>(table.size()), chunks,
                                           digests.data()};
  cuemu::Launch launch;
  launch.grid.x = static_cast<unsigned>(random.from(1, 3));
  launch.block.x = cuda::kThreads;
  launch.seed = seed;
  cuemu::launch(launch, [&] { lora_refit_digest(arguments); });

  std::vector<uint64_t> expected(buffers.size());
  digest_buffers(addresses(buffers).data(), sizes.data(), buffers.size(), expected.data(), 1);
  if (digests != expected) throw std::runtime_error("the digests differ from the CPU's");
}

}  // namespace
}  // namespace lora_refit::testing

int main(int argc, char** argv) {
  const uint64_t first = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 0;
  const uint64_t count = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 50;
  for (uint64_t seed = first; seed < first + count; ++seed) {
    try {
      lora_refit::testing::check_digest(seed);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "seed %llu: %s\n", static_cast<unsigned long long>(seed), error.what());
      return 1;
    }
  }
  std::printf("%llu lists of buffers have the CPU's digests\n",
              static_cast<unsigned long long>(count));
  return 0;
}
