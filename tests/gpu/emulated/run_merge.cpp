// Runs merge programs on the emulator: run_merge <programs> <results>. Both files are sequences of
// arrays, each an int64 count of bytes and these bytes; merge_emulated.py has their order.
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include "cuda/merge_shape.h"
#include "cuemu/launch.h"

extern "C" {
void lora_refit_merge_f32(lora_refit::cuda::MergeArguments arguments);
void lora_refit_merge_f16(lora_refit::cuda::MergeArguments arguments);
void lora_refit_merge_bf16(lora_refit::cuda::MergeArguments arguments);
}

namespace {

using namespace lora_refit;

class Arrays {
 public:
  explicit Arrays(const char* path) : file_(std::fopen(path, "rb")) {
    if (file_ == nullptr) throw std::runtime_error("cannot read the programs");
  }
  ~Arrays() { std::fclose(file_); }

  bool at_end() {
    const int next = std::getc(file_);
    if (next != EOF) std::ungetc(next, file_);
    return next == EOF;
  }

  template <class T>
  std::vector<T> next() {
    std::vector<T> items(static_cast<size_t>(count()) / sizeof(T));
    read(items.data(), items.size() * sizeof(T));
    return items;
  }

  int64_t count() {
    int64_t bytes;
    read(&bytes, sizeof bytes);
    return bytes;
  }

  void read(void* to, size_t bytes) {
    if (std::fread(to, 1, bytes, file_) != bytes) throw std::runtime_error("programs end early");
  }

 private:
  std::FILE* file_;
};

void write(std::FILE* file, const void* items, size_t bytes) {
  const int64_t count = static_cast<int64_t>(bytes);
  std::fwrite(&count, 1, sizeof count, file);
  std::fwrite(items, 1, bytes, file);
}

// Exactly the bytes of a buffer, at an address off a multiple of 16: AddressSanitizer sees every
// access beyond them.
class Memory {
 public:
  Memory(Arrays& arrays, int64_t misaligned) : bytes_(static_cast<size_t>(arrays.count())) {
    if (posix_memalign(&whole_, 16, misaligned + bytes_) != 0) throw std::bad_alloc();
    first_ = static_cast<char*>(whole_) + misaligned;
    arrays.read(first_, bytes_);
  }
  Memory(Memory&& other) noexcept
      : whole_(std::exchange(other.whole_, nullptr)), first_(other.first_), bytes_(other.bytes_) {}
  ~Memory() { std::free(whole_); }

  uint64_t address() const { return reinterpret_cast<uint64_t>(first_); }
  void save(std::FILE* file) const { write(file, first_, bytes_); }

 private:
  void* whole_ = nullptr;
  char* first_;
  size_t bytes_;
};

std::vector<Memory> read_memories(Arrays& arrays) {
  const auto misaligned = arrays.next<int64_t>();
  std::vector<Memory> memories;
  for (int64_t offset : misaligned) memories.emplace_back(arrays, offset);
  return memories;
}

std::vector<uint64_t> addresses(const std::vector<Memory>& memories) {
  std::vector<uint64_t> result;
  for (const Memory& memory : memories) result.push_back(memory.address());
  return result;
}

struct Header {
  int64_t adapter;
  int64_t grid;
  int64_t seed;
};

void run_program(Arrays& arrays, std::FILE* results) {
  const Header header = arrays.next<Header>().at(0);
  const auto strips = arrays.next<cuda::MergeStrip>();
  const auto blocks = arrays.next<MergeBlock>();
  const auto segments = arrays.next<MergeSegment>();
  const auto src_dtypes = arrays.next<int32_t>();
  const auto dst_dtypes = arrays.next<int32_t>();
  auto sums = arrays.next<MergeSums>();
  const std::vector<Memory> sources = read_memories(arrays);
  const std::vector<Memory> destinations = read_memories(arrays);
  const auto src_addresses = addresses(sources);
  const auto dst_addresses = addresses(destinations);
  std::vector<uint64_t> digests(destinations.size());

  const cuda::MergeArguments arguments = {strips.data(),        static_cast<int64_t>(strips.size()),
                                          blocks.data(),        segments.data(),
                                          src_dtypes.data(),    dst_dtypes.data(),
                                          src_addresses.data(), dst_addresses.data(),
                                          digests.data(),       sums.data()};
  constexpr void (*kKernels[])(cuda::MergeArguments) = {lora_refit_merge_f32, lora_refit_merge_f16,
                                                        lora_refit_merge_bf16};
  cuemu::Launch launch;
  launch.grid.x = static_cast<unsigned>(header.grid);
  launch.block.x = cuda::kThreads;
  launch.dynamic_shared_bytes = cuda::merge_shared_bytes(static_cast<DType>(header.adapter));
  launch.seed = static_cast<uint64_t>(header.seed);
  cuemu::launch(launch, [&] { kKernels[header.adapter](arguments); });

  for (const Memory& memory : destinations) memory.save(results);
  write(results, digests.data(), digests.size() * sizeof(uint64_t));
  write(results, sums.data(), sums.size() * sizeof(MergeSums));
}

}  // namespace

int main(int, char** arguments) {
  try {
    Arrays arrays(arguments[1]);
    std::FILE* results = std::fopen(arguments[2], "wb");
    if (results == nullptr) throw std::runtime_error("cannot write the results");
    while (!arrays.at_end()) run_program(arrays, results);
    std::fclose(results);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
