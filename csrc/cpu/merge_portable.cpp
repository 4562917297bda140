// Merge kernels in plain C++: the path of CPUs without AVX2, and the reference of the fast one.
#include "cpu/merge_portable.h"

#include "cpu/merge_walk.h"

namespace lora_refit {
namespace {

PanelRow multiply_panel(const float* b, const PanelRow* a, int64_t depth) {
  PanelRow sums{};
  for (int64_t k = 0; k < depth; ++k) {
    for (int col = 0; col < kPanelCols; ++col) {
      sums.values[col] = std::fma(b[k], a[k].values[col], sums.values[col]);
    }
  }
  return sums;
}

void multiply(const ProductsJob& job) {
  for (int64_t panel = 0; panel < job.panels; ++panel) {
    for (int row = 0; row < kProductRows; ++row) {
      job.products[row * job.panels + panel] =
          multiply_panel(job.b + row * job.depth, job.a + panel * job.depth, job.depth);
    }
  }
}

void settle() {}  // plain stores stay in order

}  // namespace

MergeKernels portable_merge_kernels(DType weight, DType dst) {
  return {multiply, select_merge_writer<PortableMergeRun>(weight, dst), settle};
}

}  // namespace lora_refit
