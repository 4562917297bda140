// Physical memory of the virtual memory management functions.
#pragma once

#include <map>
#include <memory>

#include "state.h"

namespace fakecuda {

// Its pages exist as long as a handle or a mapping does.
struct PhysicalMemory {
  int fd;
  size_t bytes;
  int device;
  bool exportable;

  PhysicalMemory(int fd, size_t bytes, int device, bool exportable);
  ~PhysicalMemory();
  PhysicalMemory(const PhysicalMemory&) = delete;
};

std::map<PhysicalHandle, std::unique_ptr<PhysicalMemory>>& physical_memory();

}  // namespace fakecuda
