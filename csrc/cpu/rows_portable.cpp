// Row kernels in plain C++: the path of CPUs without AVX2, and the reference of the fast one.
#include "cpu/rows_portable.h"

#include "cpu/row_walk.h"

namespace lora_refit {

uint64_t weigh_words_portable(const std::byte* data, int64_t first, int64_t count) {
  uint64_t weighted = 0;
  for (int64_t i = 0; i < count; ++i) {
    weighted += uint64_t{load<uint32_t>(data + 4 * i)} * kWordWeights[first + i];
  }
  return weighted;
}

uint64_t weigh_halves_portable(const std::byte* data, int64_t first, int64_t count) {
  uint64_t weighted = 0;
  if (first % 2 == 1 && count > 0) {  // the high half of a word that an earlier run began
    weighted += (uint64_t{load<uint16_t>(data)} << 16) * kWordWeights[first / 2];
    data += 2, ++first, --count;
  }
  weighted += weigh_words_portable(data, first / 2, count / 2);
  if (count % 2 == 1) {
    weighted +=
        uint64_t{load<uint16_t>(data + 2 * (count - 1))} * kWordWeights[(first + count - 1) / 2];
  }
  return weighted;
}

RowsKernel portable_rows_kernel(DType src, DType dst, Scaling scaling) {
  return select_kernel<PortableRun>(src, dst, scaling);
}

}  // namespace lora_refit
