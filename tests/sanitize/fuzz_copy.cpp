// Runs random block lists under AddressSanitizer and UndefinedBehaviorSanitizer, and compares each
// with a plain loop. Buffers have exactly the size that the blocks need, so an access one byte too
// far is caught. Exit status 0: all equal and nothing reported.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "convert.h"
#include "cpu/copy.h"
#include "cpu/digest.h"
#include "fuzzing.h"

namespace lora_refit {
namespace {

struct Case {
  std::vector<CopyBlock> blocks;
  std::vector<BufferShape> sources;
  std::vector<BufferShape> destinations;
};

// Gives `block` destination strides of its own region that begins at `first`; returns its end.
int64_t lay_out_destination(Random& random, CopyBlock& block, int64_t first) {
  int axes[3] = {0, 1, 2};
  std::swap(axes[0], axes[random.from(0, 2)]);
  std::swap(axes[1], axes[random.from(1, 2)]);
  const int64_t gap = random.one_of({0, 0, 1, 3});
  int64_t step = 1;
  for (int axis : axes) {
    block.dst_stride[axis] = step;
    step = step * std::max<int64_t>(1, block.size[axis]) + gap;
  }
  block.dst_offset = first;
  if (random.from(0, 3) == 0 && block.size[1] > 0) {  // rows written upwards
    block.dst_offset += (block.size[1] - 1) * block.dst_stride[1];
    block.dst_stride[1] = -block.dst_stride[1];
  }
  return first + step;
}

// Gives `block` source strides of any sign; returns the number of elements they need.
int64_t lay_out_source(Random& random, CopyBlock& block) {
  const bool like_destination = random.from(0, 1) == 0;
  int64_t lowest = 0;
  int64_t highest = 0;
  for (int axis = 0; axis < 3; ++axis) {
    const int64_t stride =
        like_destination ? block.dst_stride[axis] : random.one_of({-17, -1, 0, 1, 1, 2, 40});
    block.src_stride[axis] = stride;
    const int64_t reach = std::max<int64_t>(0, block.size[axis] - 1) * stride;
    (reach < 0 ? lowest : highest) += reach;
  }
  block.src_offset = random.from(0, 3) - lowest;
  return block.src_offset + highest + 1;
}

Case random_case(Random& random) {
  Case result;
  for (int i = 0; i < 2; ++i) {
    result.sources.push_back({random.dtype(), 0});
    result.destinations.push_back({random.dtype(), 0});
  }
  const int64_t count = random.from(1, 8);
  for (int64_t i = 0; i < count; ++i) {
    CopyBlock block{};
    block.src = static_cast<int32_t>(random.from(kZeroFill, 1));
    block.dst = static_cast<int32_t>(random.from(0, 1));
    for (int64_t& size : block.size) size = random.one_of({0, 1, 1, 2, 3, 8, 15, 16, 33});
    if (random.from(0, 9) == 0) block.size[2] = random.from(1000, 9000);
    block.scale = random.one_of({1.0f, 1.0f, 2.0f, -0.3f});
    block.flags = random.from(0, 1) == 0 ? 0 : kScaleOnce;
    int64_t& dst_elements = result.destinations[block.dst].elements;
    dst_elements = lay_out_destination(random, block, dst_elements + random.from(0, 2));
    const int64_t src_elements = lay_out_source(random, block);
    if (block.src != kZeroFill) {
      int64_t& needed = result.sources[block.src].elements;
      needed = std::max(needed, src_elements);
    }
    result.blocks.push_back(block);
  }
  return result;
}

template <DType kSrc, DType kDst>
void convert_element(const CopyBlock& block, const std::byte* from, std::byte* to) {
  typename Element<kSrc>::Bits in;
  std::memcpy(&in, from, sizeof in);
  typename Element<kDst>::Bits out;
  if (block.scale == 1.0f) {
    out = convert<kSrc, kDst, Scaling::kNone>(in, 1.0f);
  } else if (block.flags & kScaleOnce) {
    out = convert<kSrc, kDst, Scaling::kBeforeCast>(in, block.scale);
  } else {
    out = convert<kSrc, kDst, Scaling::kAfterCast>(in, block.scale);
  }
  std::memcpy(to, &out, sizeof out);
}

using ConvertElement = void (*)(const CopyBlock&, const std::byte*, std::byte*);
constexpr ConvertElement kConvertElement[3][3] = {
    {convert_element<DType::kF32, DType::kF32>, convert_element<DType::kF32, DType::kF16>,
     convert_element<DType::kF32, DType::kBF16>},
    {convert_element<DType::kF16, DType::kF32>, convert_element<DType::kF16, DType::kF16>,
     convert_element<DType::kF16, DType::kBF16>},
    {convert_element<DType::kBF16, DType::kF32>, convert_element<DType::kBF16, DType::kF16>,
     convert_element<DType::kBF16, DType::kBF16>},
};

void run_plainly(const Case& test, const std::vector<Bytes>& sources,
                 std::vector<Bytes>& destinations) {
  for (const CopyBlock& block : test.blocks) {
    const DType dst = test.destinations[block.dst].dtype;
    for (int64_t i = 0; i < block.size[0]; ++i) {
      for (int64_t j = 0; j < block.size[1]; ++j) {
        for (int64_t k = 0; k < block.size[2]; ++k) {
          const int64_t to = block.dst_offset + i * block.dst_stride[0] + j * block.dst_stride[1] +
                             k * block.dst_stride[2];
          std::byte* target = destinations[block.dst].data() + to * element_bytes(dst);
          if (block.src == kZeroFill) {
            std::memset(target, 0, element_bytes(dst));
            continue;
          }
          const DType src = test.sources[block.src].dtype;
          const int64_t from = block.src_offset + i * block.src_stride[0] +
                               j * block.src_stride[1] + k * block.src_stride[2];
          kConvertElement[static_cast<int>(src)][static_cast<int>(dst)](
              block, sources[block.src].data() + from * element_bytes(src), target);
        }
      }
    }
  }
}

void check_once(Random& random) {
  const Case test = random_case(random);
  std::vector<Bytes> sources = allocate(test.sources, std::byte{0});
  for (Bytes& source : sources) random.fill(source);
  std::vector<Bytes> expected = allocate(test.destinations, std::byte{0});
  std::vector<Bytes> got = allocate(test.destinations, std::byte{0});
  run_plainly(test, sources, expected);

  const int64_t tile_bytes = random.one_of({64, 1000, 4096, 1 << 17});
  const CopyProgram program(test.blocks, test.sources, test.destinations, tile_bytes);
  std::vector<uint64_t> digests(got.size());
  program.run(addresses(sources).data(), addresses(got).data(), digests.data(),
              static_cast<int>(random.from(1, 3)));
  require(got == expected, "the destinations differ from the plain loop");

  std::vector<uint64_t> sizes;
  for (const Bytes& buffer : got) sizes.push_back(buffer.size());
  std::vector<uint64_t> reread(got.size());
  digest_buffers(addresses(got).data(), sizes.data(), got.size(), reread.data(), 1);
  require(digests == reread, "the digests differ from a contiguous re-read");
}

// Extreme fields must be refused, or be harmless, without overflow.
void check_refusals(Random& random) {
  Case test = random_case(random);
  CopyBlock& block = test.blocks[random.from(0, static_cast<int64_t>(test.blocks.size()) - 1)];
  int64_t* const fields[] = {&block.src_offset,    &block.dst_offset,    &block.size[0],
                             &block.size[2],       &block.src_stride[0], &block.src_stride[2],
                             &block.dst_stride[1], &block.dst_stride[2]};
  *random.one_of(fields) = random.one_of({INT64_MAX, INT64_MIN, int64_t{1} << 62, int64_t{-5}});
  try {
    const CopyProgram program(test.blocks, test.sources, test.destinations, 4096);
    std::vector<Bytes> sources = allocate(test.sources, std::byte{1});
    std::vector<Bytes> destinations = allocate(test.destinations, std::byte{0});
    std::vector<uint64_t> digests(destinations.size());
    program.run(addresses(sources).data(), addresses(destinations).data(), digests.data(), 2);
  } catch (const std::invalid_argument&) {
  }
}

}  // namespace
}  // namespace lora_refit

int main(int argc, char** argv) {
  const int cases = argc > 1 ? std::atoi(argv[1]) : 500;
  const bool passed = lora_refit::all_pass(cases, [](lora_refit::Random& random) {
    lora_refit::check_once(random);
    lora_refit::check_refusals(random);
  });
  if (passed) std::printf("%d random block lists equal the plain loop\n", cases);
  return passed ? 0 : 1;
}
