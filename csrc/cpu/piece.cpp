#include "cpu/piece.h"

#include <algorithm>
#include <cstring>

namespace lora_refit {
namespace {

// Elements that a strided row gathers at a time: they and their converted twins fit L1.
constexpr int64_t kStagedElements = 1024;

template <class Bits>
void gather(const std::byte* from, int64_t stride, int64_t count, std::byte* to) {
  for (int64_t i = 0; i < count; ++i) {
    std::memcpy(to + i * sizeof(Bits), from + i * stride * int64_t{sizeof(Bits)}, sizeof(Bits));
  }
}

void gather(DType dtype, const std::byte* from, int64_t stride, int64_t count, std::byte* to) {
  if (element_bytes(dtype) == 4) {
    gather<uint32_t>(from, stride, count, to);
  } else {
    gather<uint16_t>(from, stride, count, to);
  }
}

// Writes every `stride`-th element and adds each to the digest at its own position.
template <class Bits>
void scatter(const std::byte* from, int64_t count, std::byte* base, int64_t position,
             int64_t stride, DigestSum& sum) {
  constexpr int64_t kPerWord = 4 / sizeof(Bits);
  for (int64_t i = 0; i < count; ++i, position += stride) {
    Bits bits;
    std::memcpy(&bits, from + i * sizeof(Bits), sizeof bits);
    std::memcpy(base + position * int64_t{sizeof(Bits)}, &bits, sizeof bits);
    const int64_t word = position / kPerWord;
    const uint64_t value = uint64_t{bits} << (position % kPerWord * 16);
    sum.add(static_cast<uint64_t>(word / kChunkWords), value * kWordWeights[word % kChunkWords]);
  }
}

void run_contiguous(const Piece& piece, int64_t batch, const std::byte* src, std::byte* dst,
                    DigestSum& sum) {
  const CopyBlock& box = piece.box;
  const int64_t src_bytes = element_bytes(piece.src_dtype);
  const int64_t dst_bytes = element_bytes(piece.dst_dtype);
  const int64_t src_position = box.src_offset + batch * box.src_stride[0];
  const int64_t dst_position = box.dst_offset + batch * box.dst_stride[0];
  const RowsJob job = {src + src_position * src_bytes,
                       dst + dst_position * dst_bytes,
                       box.size[1],
                       box.size[2],
                       box.src_stride[1] * src_bytes,
                       box.dst_stride[1] * dst_bytes,
                       dst_position,
                       box.dst_stride[1],
                       box.scale};
  piece.kernel(job, sum);
}

// A row whose elements are not neighbours on one side or both.
void run_strided_row(const Piece& piece, int64_t src_position, int64_t dst_position,
                     const std::byte* src, std::byte* dst, DigestSum& sum) {
  alignas(64) std::byte gathered[kStagedElements * 4];
  alignas(64) std::byte converted[kStagedElements * 4];
  const CopyBlock& box = piece.box;
  const bool direct = dst_is_contiguous(box);
  for (int64_t done = 0; done < box.size[2]; done += kStagedElements) {
    const int64_t count = std::min(kStagedElements, box.size[2] - done);
    const int64_t from = src_position + done * box.src_stride[2];
    const int64_t to = dst_position + done * box.dst_stride[2];
    gather(piece.src_dtype, src + from * element_bytes(piece.src_dtype), box.src_stride[2], count,
           gathered);
    std::byte* target = direct ? dst + to * element_bytes(piece.dst_dtype) : converted;
    DigestSum discarded;
    piece.kernel(RowsJob{gathered, target, 1, count, 0, 0, direct ? to : 0, 0, box.scale},
                 direct ? sum : discarded);
    if (direct) continue;
    if (element_bytes(piece.dst_dtype) == 4) {
      scatter<uint32_t>(converted, count, dst, to, box.dst_stride[2], sum);
    } else {
      scatter<uint16_t>(converted, count, dst, to, box.dst_stride[2], sum);
    }
  }
}

// Zeros add nothing to a digest.
void zero_row(const Piece& piece, int64_t position, std::byte* dst) {
  const CopyBlock& box = piece.box;
  const int64_t bytes = element_bytes(piece.dst_dtype);
  if (dst_is_contiguous(box)) {
    std::memset(dst + position * bytes, 0, static_cast<size_t>(box.size[2] * bytes));
    return;
  }
  for (int64_t i = 0; i < box.size[2]; ++i) {
    std::memset(dst + (position + i * box.dst_stride[2]) * bytes, 0, static_cast<size_t>(bytes));
  }
}

}  // namespace

void run_piece(const Piece& piece, const std::byte* src, std::byte* dst, DigestSum& sum) {
  const CopyBlock& box = piece.box;
  const bool contiguous = src_is_contiguous(box) && dst_is_contiguous(box);
  for (int64_t batch = 0; batch < box.size[0]; ++batch) {
    if (box.src != kZeroFill && contiguous) {
      run_contiguous(piece, batch, src, dst, sum);
      continue;
    }
    for (int64_t row = 0; row < box.size[1]; ++row) {
      const int64_t to = box.dst_offset + batch * box.dst_stride[0] + row * box.dst_stride[1];
      if (box.src == kZeroFill) {
        zero_row(piece, to, dst);
      } else {
        const int64_t from = box.src_offset + batch * box.src_stride[0] + row * box.src_stride[1];
        run_strided_row(piece, from, to, src, dst, sum);
      }
    }
  }
}

}  // namespace lora_refit
