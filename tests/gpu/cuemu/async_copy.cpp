#include "cuemu/async_copy.h"

#include <utility>

#include "cuemu/block.h"

namespace cuemu {

void start_copy(const AsyncCopy& copy) { Block::running().current().copies.push_back(copy); }

AsyncCopies take_copies() { return std::exchange(Block::running().current().copies, {}); }

}  // namespace cuemu
