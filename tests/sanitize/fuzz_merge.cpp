// Runs random merge programs under AddressSanitizer and UndefinedBehaviorSanitizer, and compares
// each with a plain loop, bit for bit. Buffers have exactly the size that the blocks need, so an
// access one byte too far is caught. Exit status 0: all equal and nothing reported.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "convert.h"
#include "cpu/digest.h"
#include "cpu/merge.h"
#include "fuzzing.h"

namespace lora_refit {
namespace {

struct Case {
  std::vector<MergeBlock> blocks;
  std::vector<MergeSegment> segments;
  std::vector<BufferShape> sources;
  std::vector<BufferShape> destinations;
};

constexpr int32_t kWeight = 0;
constexpr int32_t kB = 1;
constexpr int32_t kA = 2;

void need(BufferShape& buffer, int64_t elements) {
  buffer.elements = std::max(buffer.elements, elements);
}

// Random strides of a matrix, of any sign; returns the offset at which it begins.
int64_t lay_out(Random& random, int64_t rows, int64_t cols, int64_t& row_stride,
                int64_t& col_stride, BufferShape& buffer) {
  row_stride = random.one_of({cols, int64_t{1}, int64_t{0}, -cols - 1});
  col_stride = random.one_of({int64_t{1}, int64_t{1}, rows, int64_t{-2}});
  const int64_t row_reach = (rows - 1) * row_stride;
  const int64_t col_reach = (cols - 1) * col_stride;
  const int64_t offset =
      random.from(0, 3) - std::min<int64_t>(0, row_reach) - std::min<int64_t>(0, col_reach);
  need(buffer, offset + std::max<int64_t>(0, row_reach) + std::max<int64_t>(0, col_reach) + 1);
  return offset;
}

void add_segment(Random& random, const MergeBlock& block, Case& test) {
  MergeSegment segment{};
  segment.b = kB;
  segment.a = kA;
  segment.rank = random.one_of({0, 1, 2, 7, 8, 16, 33});
  if (segment.rank > 0 && block.rows > 0 && block.cols > 0) {
    segment.b_offset = lay_out(random, block.rows, segment.rank, segment.b_row_stride,
                               segment.b_k_stride, test.sources[kB]);
    segment.a_offset = lay_out(random, segment.rank, block.cols, segment.a_k_stride,
                               segment.a_col_stride, test.sources[kA]);
  }
  test.segments.push_back(segment);
}

void add_block(Random& random, Case& test) {
  MergeBlock block{};
  block.weight = kWeight;
  block.dst = static_cast<int32_t>(random.from(0, 1));
  block.rows = random.one_of({0, 1, 2, 5, 6, 7, 13});
  block.cols = random.one_of({0, 1, 3, 8, 16, 17, 40, 100});
  if (random.from(0, 9) == 0) block.cols = random.from(1000, 3000);
  block.scale = random.one_of({1.0f, 0.5f, -0.3f, 0.0f});
  block.module = static_cast<int32_t>(random.from(0, 1));

  BufferShape& dst = test.destinations[block.dst];
  block.dst_offset = dst.elements + random.from(0, 2);
  block.dst_row_stride = block.cols + random.one_of({0, 0, 1, 3});
  dst.elements = block.dst_offset + block.rows * block.dst_row_stride;
  block.weight_offset = random.from(0, 3);
  block.weight_row_stride = random.one_of({int64_t{0}, block.cols, block.cols + 1});
  need(test.sources[kWeight],
       block.weight_offset + block.rows * block.weight_row_stride + block.cols);

  block.first_segment = static_cast<int32_t>(test.segments.size());
  block.segment_count = static_cast<int32_t>(random.from(0, 3));
  for (int32_t i = 0; i < block.segment_count; ++i) add_segment(random, block, test);
  test.blocks.push_back(block);
}

Case random_case(Random& random) {
  Case result;
  const DType adapter = random.dtype();
  result.sources = {{random.dtype(), 0}, {adapter, 0}, {adapter, 0}};
  result.destinations = {{random.dtype(), 0}, {random.dtype(), 0}};
  const int64_t count = random.from(1, 6);
  for (int64_t i = 0; i < count; ++i) add_block(random, result);
  return result;
}

// Of any bits, NaNs and infinities among them.
float read(const BufferShape& shape, const Bytes& buffer, int64_t index) {
  const std::byte* at = buffer.data() + index * element_bytes(shape.dtype);
  if (shape.dtype == DType::kF32) {
    uint32_t bits;
    std::memcpy(&bits, at, sizeof bits);
    return float_from_bits(bits);
  }
  uint16_t bits;
  std::memcpy(&bits, at, sizeof bits);
  return shape.dtype == DType::kF16 ? f16_to_float(bits) : bf16_to_float(bits);
}

void write(const BufferShape& shape, Bytes& buffer, int64_t index, float value) {
  std::byte* at = buffer.data() + index * element_bytes(shape.dtype);
  if (shape.dtype == DType::kF32) {
    std::memcpy(at, &value, sizeof value);
    return;
  }
  const uint16_t bits = shape.dtype == DType::kF16 ? float_to_f16(value) : float_to_bf16(value);
  std::memcpy(at, &bits, sizeof bits);
}

float merged(const Case& test, const std::vector<Bytes>& sources, const MergeBlock& block,
             int64_t row, int64_t col) {
  float product = 0;
  int64_t depth = 0;
  for (int32_t i = 0; i < block.segment_count; ++i) {
    const MergeSegment& segment = test.segments[block.first_segment + i];
    for (int64_t k = 0; k < segment.rank; ++k) {
      const int64_t b = segment.b_offset + row * segment.b_row_stride + k * segment.b_k_stride;
      const int64_t a = segment.a_offset + k * segment.a_k_stride + col * segment.a_col_stride;
      product = std::fma(read(test.sources[kB], sources[kB], b),
                         read(test.sources[kA], sources[kA], a), product);
    }
    depth += segment.rank;
  }
  const float weight = read(test.sources[kWeight], sources[kWeight],
                            block.weight_offset + row * block.weight_row_stride + col);
  const float sum = depth == 0 ? weight : std::fma(block.scale, product, weight);
  return sum == sum ? sum : float_from_bits(0x7FFFFFFFu);
}

void run_plainly(const Case& test, const std::vector<Bytes>& sources,
                 std::vector<Bytes>& destinations, std::vector<MergeSums>& sums) {
  for (const MergeBlock& block : test.blocks) {
    for (int64_t row = 0; row < block.rows; ++row) {
      for (int64_t col = 0; col < block.cols; ++col) {
        write(test.destinations[block.dst], destinations[block.dst],
              block.dst_offset + row * block.dst_row_stride + col,
              merged(test, sources, block, row, col));
      }
    }
    sums[block.module].elements += static_cast<uint64_t>(block.rows * block.cols);
  }
}

void check_once(Random& random) {
  const Case test = random_case(random);
  std::vector<Bytes> sources = allocate(test.sources, std::byte{0});
  for (Bytes& source : sources) random.fill(source);
  std::vector<Bytes> expected = allocate(test.destinations, std::byte{0});
  std::vector<Bytes> got = allocate(test.destinations, std::byte{0});
  std::vector<MergeSums> expected_sums(2);
  std::vector<MergeSums> sums(2);
  run_plainly(test, sources, expected, expected_sums);

  const MergeProgram program(test.blocks, test.segments, test.sources, test.destinations, 2);
  std::vector<uint64_t> digests(got.size());
  program.run(addresses(sources).data(), addresses(got).data(), digests.data(), sums.data(),
              static_cast<int>(random.from(1, 3)));
  require(got == expected, "the destinations differ from the plain loop");
  for (size_t i = 0; i < sums.size(); ++i) {
    require(sums[i].elements == expected_sums[i].elements, "elements were miscounted");
  }

  std::vector<uint64_t> sizes;
  for (const Bytes& buffer : got) sizes.push_back(buffer.size());
  std::vector<uint64_t> reread(got.size());
  digest_buffers(addresses(got).data(), sizes.data(), got.size(), reread.data(), 1);
  require(digests == reread, "the digests differ from a contiguous re-read");
}

// Extreme fields must be refused, or be harmless, without overflow.
void check_refusals(Random& random) {
  Case test = random_case(random);
  MergeBlock& block = test.blocks[random.from(0, static_cast<int64_t>(test.blocks.size()) - 1)];
  const int64_t extreme = random.one_of({INT64_MAX, INT64_MIN, int64_t{1} << 62, int64_t{-5}});
  if (!test.segments.empty() && random.from(0, 1) == 0) {
    const int64_t last = static_cast<int64_t>(test.segments.size()) - 1;
    MergeSegment& segment = test.segments[random.from(0, last)];
    int64_t* const fields[] = {&segment.b_offset,     &segment.a_offset,   &segment.b_row_stride,
                               &segment.a_col_stride, &segment.a_k_stride, &segment.rank};
    *random.one_of(fields) = extreme;
    if (random.from(0, 3) == 0) segment.b_k_stride = segment.a_k_stride = 0;
  } else {
    int64_t* const fields[] = {
        &block.weight_offset, &block.dst_offset,        &block.rows,
        &block.cols,          &block.weight_row_stride, &block.dst_row_stride};
    *random.one_of(fields) = extreme;
  }
  try {
    const MergeProgram program(test.blocks, test.segments, test.sources, test.destinations, 2);
    std::vector<Bytes> sources = allocate(test.sources, std::byte{1});
    std::vector<Bytes> destinations = allocate(test.destinations, std::byte{0});
    std::vector<uint64_t> digests(destinations.size());
    std::vector<MergeSums> sums(2);
    program.run(addresses(sources).data(), addresses(destinations).data(), digests.data(),
                sums.data(), 2);
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
  if (passed) std::printf("%d random merge programs equal the plain loop\n", cases);
  return passed ? 0 : 1;
}
