#include "pages.h"

#include <sys/mman.h>
#include <unistd.h>

#include <array>

#include "state.h"

namespace fakecuda {

int new_pages(const std::string& name, size_t bytes) {
  const int fd = memfd_create(name.c_str(), MFD_CLOEXEC);
  require(fd >= 0, kErrorOutOfMemory);
  if (ftruncate(fd, static_cast<off_t>(bytes)) != 0) {
    close(fd);
    refuse(kErrorOutOfMemory);
  }
  return fd;
}

void* map_pages(int fd, size_t bytes, int protection, void* fixed) {
  const int flags = MAP_SHARED | (fixed != nullptr ? MAP_FIXED : 0);
  void* address = mmap(fixed, bytes, protection, flags, fd, 0);
  require(address != MAP_FAILED, kErrorMapFailed);
  return address;
}

std::string name_of_pages(const std::string& path) {
  std::array<char, 256> target{};
  const std::string prefix = "/memfd:";
  if (readlink(path.c_str(), target.data(), target.size() - 1) < 0) return "";
  const std::string text = target.data();
  const std::string name = text.substr(0, text.rfind(" (deleted)"));
  return name.rfind(prefix + "fakecuda", 0) == 0 ? name.substr(prefix.size()) : "";
}

}  // namespace fakecuda
