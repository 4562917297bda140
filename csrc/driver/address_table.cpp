#include "driver/address_table.h"

#include <algorithm>

namespace lora_refit::driver {

AddressTable::AddressTable(const Device& device, size_t source_count, size_t destination_count)
    : device_(device),
      source_count_(source_count),
      destination_count_(destination_count),
      staging_(device, count() * sizeof(uint64_t)),
      table_(device, count() * sizeof(uint64_t)) {}

const uint64_t* AddressTable::sources() const {
  return reinterpret_cast<const uint64_t*>(table_.address());
}

bool AddressTable::holds(const Addresses& addresses) const {
  if (count() == 0) return true;
  const uint64_t* staged = static_cast<const uint64_t*>(staging_.data());
  return uploaded_ && std::equal(staged, staged + source_count_, addresses.sources) &&
         std::equal(staged + source_count_, staged + count(), addresses.destinations);
}

void AddressTable::upload(const Addresses& addresses, StreamHandle stream) {
  uint64_t* staged = static_cast<uint64_t*>(staging_.data());
  std::copy_n(addresses.sources, source_count_, staged);
  std::copy_n(addresses.destinations, destination_count_, staged + source_count_);
  Context(device_).call(&Api::cuMemcpyHtoDAsync, table_.address(), static_cast<const void*>(staged),
                        count() * sizeof(uint64_t), stream);
  uploaded_ = true;
}

}  // namespace lora_refit::driver
