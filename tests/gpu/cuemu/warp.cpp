#include "cuemu/warp.h"

#include <cstring>
#include <string>

#include "cuemu/block.h"
#include "cuemu/error.h"

namespace cuemu {
namespace {

bool contains(uint32_t mask, unsigned lane) { return (mask >> lane & 1) != 0; }

// Byte by byte, because ThreadSanitizer intercepts memcpy and would see the lanes' payloads as
// shared data.
void copy_unseen(char* to, const void* from, int bytes) {
  for (int i = 0; i < bytes; ++i) to[i] = static_cast<const volatile char*>(from)[i];
}

// Whether all lanes in the mask have arrived. Throws if one of them never can.
bool all_arrived(Block& block, const Thread& self, unsigned first_of_warp) {
  const WarpMeeting& mine = self.meeting;
  bool all = true;
  for (unsigned lane = 0; lane < kWarpLanes; ++lane) {
    if (!contains(mine.mask, lane)) continue;
    const unsigned number = first_of_warp + lane;
    if (number >= block.thread_count()) {
      throw Error(std::string(mine.operation) +
                  " names a lane that does not exist: " + block.where(self));
    }
    const Thread& other = block.thread(number);
    if (other.state == State::kReturned) {
      throw Error(std::string(mine.operation) +
                  " names a lane that has returned: " + block.where(self));
    }
    if (other.state != State::kInWarpCollective) {
      all = false;
    } else if (std::strcmp(other.meeting.operation, mine.operation) != 0 ||
               other.meeting.mask != mine.mask) {
      throw Error(std::string(mine.operation) + " meets " + other.meeting.operation +
                  " or another mask in one warp: " + block.where(self));
    }
  }
  return all;
}

void complete(Block& block, uint32_t mask, unsigned first_of_warp) {
  Payloads payloads{};
  std::array<Token*, kWarpLanes> tokens{};
  for (unsigned lane = 0; lane < kWarpLanes; ++lane) {
    if (!contains(mask, lane)) continue;
    WarpMeeting& meeting = block.thread(first_of_warp + lane).meeting;
    payloads[lane] = meeting.payload[meeting.turn % 2];
    tokens[lane] = &meeting.tokens[meeting.turn % 2];
  }
  for (unsigned lane = 0; lane < kWarpLanes; ++lane) {
    if (!contains(mask, lane)) continue;
    Thread& thread = block.thread(first_of_warp + lane);
    thread.meeting.payloads = payloads;
    thread.meeting.others = tokens;
    thread.state = State::kReady;
  }
}

}  // namespace

const Payloads& exchange(const char* operation, uint32_t mask, const void* payload, int bytes) {
  Block& block = Block::running();
  Thread& self = block.current();
  const unsigned lane = self.number % kWarpLanes;
  const unsigned first_of_warp = self.number - lane;
  if (bytes > kPayloadBytes) throw Error(std::string(operation) + " exchanges too many bytes");
  if (!contains(mask, lane)) {
    throw Error(std::string(operation) + " by a lane outside its own mask: " + block.where(self));
  }
  WarpMeeting& mine = self.meeting;
  mine.operation = operation;
  mine.mask = mask;
  ++mine.turn;
  copy_unseen(mine.payload[mine.turn % 2], payload, bytes);
  self.state = State::kInWarpCollective;
  if (all_arrived(block, self, first_of_warp)) {
    complete(block, mask, first_of_warp);
  } else {
    block.suspend(State::kInWarpCollective);
  }
  return mine.payloads;
}

void synchronise_warp(uint32_t mask) {
  WarpMeeting& mine = Block::running().current().meeting;
  mine.tokens[(mine.turn + 1) % 2].release();
  exchange("__syncwarp", mask, "", 1);
  for (Token* token : mine.others) {
    if (token != nullptr) token->acquire();
  }
}

unsigned lane_number() { return Block::running().current().number % kWarpLanes; }

}  // namespace cuemu
