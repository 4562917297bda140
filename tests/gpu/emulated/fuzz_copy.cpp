// Runs random block lists with the copy kernel on the emulator, each with a random schedule, and
// compares bytes and digests with the CPU's copy. Arguments: the first seed, and how many.
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <set>
#include <stdexcept>
#include <vector>

#include "cpu/copy.h"
#include "cuda/kernels.h"
#include "cuemu/launch.h"
#include "emulated/copy_cases.h"

extern "C" int64_t tile_table(const lora_refit::CopyBlock* blocks, int64_t block_count,
                              const int32_t* src_dtypes, const int64_t* src_sizes,
                              int64_t src_count, const int32_t* dst_dtypes,
                              const int64_t* dst_sizes, int64_t dst_count,
                              lora_refit::cuda::CopyTile* tiles, int64_t capacity);

extern "C" void lora_refit_copy(lora_refit::cuda::CopyArguments arguments);

namespace lora_refit::testing {
namespace {

struct Shapes {
  explicit Shapes(const std::vector<BufferShape>& shapes) {
    for (const BufferShape& shape : shapes) {
      dtypes.push_back(static_cast<int32_t>(shape.dtype));
      sizes.push_back(shape.elements);
    }
  }
  std::vector<int32_t> dtypes;
  std::vector<int64_t> sizes;
};

std::vector<cuda::CopyTile> make_tiles(const CopyCase& test) {
  const Shapes src(test.sources);
  const Shapes dst(test.destinations);
  std::vector<cuda::CopyTile> tiles;
  const auto fill = [&] {
    return tile_table(test.blocks.data(), static_cast<int64_t>(test.blocks.size()),
                      src.dtypes.data(), src.sizes.data(), kDTypeCount, dst.dtypes.data(),
                      dst.sizes.data(), kDTypeCount, tiles.data(),
                      static_cast<int64_t>(tiles.size()));
  };
  tiles.resize(static_cast<size_t>(fill()));
  fill();
  return tiles;
}

std::vector<Buffer> allocate(const std::vector<BufferShape>& shapes,
                             const std::vector<int64_t>& misaligned) {
  std::vector<Buffer> buffers;
  for (size_t i = 0; i < shapes.size(); ++i) {
    const int64_t element = element_bytes(shapes[i].dtype);
    buffers.emplace_back(shapes[i].elements * element, misaligned[i] * element);
  }
  return buffers;
}

std::vector<int64_t> random_misalignment(Random& random) {
  std::vector<int64_t> elements;
  for (int i = 0; i < kDTypeCount; ++i) elements.push_back(random.one_of({0, 0, 1, 2, 4, 7}));
  return elements;
}

void require(bool condition, const char* what) {
  if (!condition) throw std::runtime_error(what);
}

// Adds the variants of the tiles to `seen`.
void check_copy(uint64_t seed, std::set<int32_t>& seen) {
  Random random(seed);
  const CopyCase test = random_copy_case(random);
  std::vector<Buffer> sources = allocate(test.sources, random_misalignment(random));
  for (int i = 0; i < kDTypeCount; ++i) {
    fill_with_values(random, test.sources[i].dtype, sources[i]);
  }
  const std::vector<int64_t> misaligned = random_misalignment(random);
  const std::vector<Buffer> expected = allocate(test.destinations, misaligned);
  const std::vector<Buffer> got = allocate(test.destinations, misaligned);
  const std::vector<uint64_t> src = addresses(sources);

  std::vector<uint64_t> expected_digests(kDTypeCount);
  const CopyProgram program(test.blocks, test.sources, test.destinations, kDefaultTileBytes);
  program.run(src.data(), addresses(expected).data(), expected_digests.data(), 1);

  const std::vector<cuda::CopyTile> tiles = make_tiles(test);
  for (const cuda::CopyTile& tile : tiles) seen.insert(tile.variant);
  const std::vector<uint64_t> dst = addresses(got);
  std::vector<uint64_t> digests(kDTypeCount);
  const cuda::CopyArguments arguments = {tiles.data(), static_cast<int64_t>(tiles.size()),
                                         src.data(), dst.data(), digests.data()};
  cuemu::Launch launch;
  launch.grid.x = static_cast<unsigned>(random.from(1, 3));
  launch.block.x = cuda::kThreads;
  launch.seed = seed;
  cuemu::launch(launch, [&] { lora_refit_copy(arguments); });

  for (int i = 0; i < kDTypeCount; ++i) {
    require(got[i].equals(expected[i]), "the destinations differ from the CPU's copy");
  }
  require(digests == expected_digests, "the digests differ from the CPU's");
}

}  // namespace
}  // namespace lora_refit::testing

int main(int argc, char** argv) {
  const uint64_t first = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 0;
  const uint64_t count = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 50;
  std::set<int32_t> variants;
  for (uint64_t seed = first; seed < first + count; ++seed) {
    try {
      lora_refit::testing::check_copy(seed, variants);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "seed %llu: %s\n", static_cast<unsigned long long>(seed), error.what());
      return 1;
    }
  }
  std::printf("%llu block lists with %zu variants equal the CPU's copy\n",
              static_cast<unsigned long long>(count), variants.size());
  return 0;
}
