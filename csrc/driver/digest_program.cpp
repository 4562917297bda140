#include "driver/digest_program.h"

#include <list>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <tuple>

#include "plan/digest_check.h"

namespace lora_refit::driver {
namespace {

constexpr int64_t kChunksPerBlock = cuda::kThreads / cuda::kWarpThreads;

void check_buffer(size_t index, uint64_t address, uint64_t bytes) {
  check_digest_buffer(index, address, bytes);
  if (address % 2 != 0) {
    throw std::invalid_argument("buffer " + std::to_string(index) + " has the odd address " +
                                std::to_string(address) + ", which a GPU cannot access");
  }
}

int64_t chunks_of(uint64_t bytes) {
  return static_cast<int64_t>(bytes / kChunkBytes) + (bytes % kChunkBytes != 0 ? 1 : 0);
}

std::vector<cuda::DigestBuffer> make_table(const std::vector<uint64_t>& addresses,
                                           const std::vector<uint64_t>& sizes_bytes) {
  std::vector<cuda::DigestBuffer> buffers;
  int64_t chunks = 0;
  for (size_t i = 0; i < addresses.size(); ++i) {
    check_buffer(i, addresses[i], sizes_bytes[i]);
    buffers.push_back({addresses[i], static_cast<int64_t>(sizes_bytes[i]), chunks});
    chunks += chunks_of(sizes_bytes[i]);
  }
  return buffers;
}

int64_t count_chunks(const std::vector<cuda::DigestBuffer>& buffers) {
  if (buffers.empty()) return 0;
  return buffers.back().first_chunk + chunks_of(static_cast<uint64_t>(buffers.back().bytes));
}

// The programs used last, each with the arguments it was made from.
class RecentPrograms {
 public:
  std::shared_ptr<DigestProgram> find(const Device& device, const std::vector<uint64_t>& addresses,
                                      const std::vector<uint64_t>& sizes_bytes) {
    const Key key{device.ordinal(), addresses, sizes_bytes};
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto entry = entries_.begin(); entry != entries_.end(); ++entry) {
      if (entry->key != key) continue;
      entries_.splice(entries_.begin(), entries_, entry);
      return entries_.front().program;
    }
    auto program = std::make_shared<DigestProgram>(device, addresses, sizes_bytes);
    entries_.push_front({key, program});
    if (entries_.size() > kMost) entries_.pop_back();
    return program;
  }

 private:
  using Key = std::tuple<int, std::vector<uint64_t>, std::vector<uint64_t>>;
  struct Entry {
    Key key;
    std::shared_ptr<DigestProgram> program;
  };
  static constexpr size_t kMost = 8;

  std::mutex mutex_;
  std::list<Entry> entries_;
};

}  // namespace

DigestProgram::DigestProgram(const Device& device, const std::vector<uint64_t>& addresses,
                             const std::vector<uint64_t>& sizes_bytes)
    : buffers_(make_table(addresses, sizes_bytes)),
      kernel_(device, cuda::kDigestKernel, cuda::kThreads, 0),
      chunk_count_(count_chunks(buffers_)),
      table_(upload(device, buffers_)),
      submission_(device, 0, 0, buffers_.size() * sizeof(uint64_t)),
      arguments_{reinterpret_cast<const cuda::DigestBuffer*>(table_.address()),
                 static_cast<int64_t>(buffers_.size()), chunk_count_,
                 reinterpret_cast<uint64_t*>(submission_.results())} {}

void DigestProgram::run(uint64_t* out, StreamHandle stream) {
  const Work work{kernel_, kernel_.grid(chunk_count_, kChunksPerBlock), &arguments_};
  submission_.run(work, {}, stream, {{out, buffers_.size() * sizeof(uint64_t)}});
}

void digest_buffers(const Device& device, const std::vector<uint64_t>& addresses,
                    const std::vector<uint64_t>& sizes_bytes, uint64_t* out, StreamHandle stream) {
  static RecentPrograms& recent = *new RecentPrograms;  // never destroyed, as the driver's contexts
  recent.find(device, addresses, sizes_bytes)->run(out, stream);
}

}  // namespace lora_refit::driver
