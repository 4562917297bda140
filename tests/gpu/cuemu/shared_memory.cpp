#include "cuemu/shared_memory.h"

#include <link.h>

#include <cstdint>
#include <new>

namespace cuemu {
namespace {

constexpr size_t kAlignment = 128;
constexpr unsigned char kNanByte = 0x7F;  // 0x7F7F7F7F is a number, 0x7FFF7FFF is a NaN

void poison(char* memory, size_t bytes) {
  for (size_t i = 0; i < bytes; ++i) {
    const unsigned char byte = i % 2 == 0 ? 0xFF : kNanByte;
    static_cast<volatile char*>(memory)[i] = static_cast<char>(byte);
  }
}

// In which loaded object this code is, and so the kernels linked with it.
thread_local char in_this_object;

int poison_object(dl_phdr_info* object, size_t, void*) {
  char* block = static_cast<char*>(object->dlpi_tls_data);
  for (int i = 0; i < object->dlpi_phnum && block != nullptr; ++i) {
    const auto& header = object->dlpi_phdr[i];
    if (header.p_type != PT_TLS) continue;
    if (&in_this_object < block || &in_this_object >= block + header.p_memsz) continue;
    poison(block + header.p_filesz, header.p_memsz - header.p_filesz);
    return 1;
  }
  return 0;
}

}  // namespace

DynamicShared allocate_dynamic_shared(size_t bytes) {
  void* memory = nullptr;
  if (posix_memalign(&memory, kAlignment, bytes) != 0) throw std::bad_alloc();
  poison(static_cast<char*>(memory), bytes);
  return DynamicShared(static_cast<char*>(memory));
}

void poison_static_shared() {
  static_cast<volatile char&>(in_this_object) = 0;  // a thread's variables exist once one is used
  dl_iterate_phdr(poison_object, nullptr);
}

}  // namespace cuemu
