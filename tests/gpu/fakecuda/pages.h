// Memory that other processes can map: a memfd whose name says what it is.
#pragma once

#include <cstddef>
#include <string>

namespace fakecuda {

// Throws Refusal(kErrorOutOfMemory).
int new_pages(const std::string& name, size_t bytes);

// Maps the pages anywhere, or at `fixed`. Throws Refusal(kErrorMapFailed).
void* map_pages(int fd, size_t bytes, int protection, void* fixed = nullptr);

// What the descriptor of a process was named, empty where it is not of this driver.
std::string name_of_pages(const std::string& path);

}  // namespace fakecuda
