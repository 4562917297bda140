// Prints which matrix element each lane's registers hold, as CuTe knows it: one line for each
// element with the map's name, the lane, the element's place in the lane, its row and its column.
#include <cstdio>
#include <cute/atom/copy_traits_sm75.hpp>
#include <cute/atom/mma_traits_sm80.hpp>
#include <map>
#include <utility>

namespace {

constexpr int kLanes = 32;

// CuTe numbers the elements of a rows-by-columns operand with the row fastest.
template <class Layout>
void print_operand(const char* name, Layout layout, int elements, int rows, bool transposed) {
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int element = 0; element < elements; ++element) {
      const int index = layout(lane, element);
      const int first = index % rows;
      const int second = index / rows;
      std::printf("%s %d %d %d %d\n", name, lane, element, transposed ? second : first,
                  transposed ? first : second);
    }
  }
}

template <class Instruction>
void print_mma(const char* a, const char* b, const char* c, int a_elements, int b_elements) {
  using Traits = cute::MMA_Traits<Instruction>;
  print_operand(a, typename Traits::ALayout{}, a_elements, 16, false);
  print_operand(b, typename Traits::BLayout{}, b_elements, 8, true);  // CuTe's B is columns by k
  print_operand(c, typename Traits::CLayout{}, 4, 16, false);
}

// CuTe numbers the bits that the lanes' row addresses give, and those that registers receive.
template <class Instruction>
void print_ldmatrix(const char* name, int matrices) {
  using Traits = cute::Copy_Traits<Instruction>;
  typename Traits::SrcLayout source;
  typename Traits::DstLayout destination;
  std::map<int, std::pair<int, int>> place_of_bit;
  for (int row = 0; row < 8 * matrices; ++row) {
    for (int column = 0; column < 8; ++column) {
      place_of_bit[source(row, column * 16)] = {row, column};
    }
  }
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int element = 0; element < 2 * matrices; ++element) {
      const auto [row, column] = place_of_bit.at(destination(lane, element * 16));
      std::printf("%s %d %d %d %d\n", name, lane, element, row, column);
    }
  }
}

}  // namespace

int main() {
  print_mma<cute::SM80_16x8x16_F32BF16BF16F32_TN>("a_16x16", "b_16x8", "c_bf16", 8, 4);
  print_mma<cute::SM80_16x8x16_F32F16F16F32_TN>("a_16x16_f16", "b_16x8_f16", "c_f16", 8, 4);
  print_mma<cute::SM80_16x8x8_F32TF32TF32F32_TN>("a_tf32", "b_tf32", "c_tf32", 4, 2);
  print_ldmatrix<cute::SM75_U32x1_LDSM_N>("x1", 1);
  print_ldmatrix<cute::SM75_U32x2_LDSM_N>("x2", 2);
  print_ldmatrix<cute::SM75_U32x4_LDSM_N>("x4", 4);
  print_ldmatrix<cute::SM75_U16x2_LDSM_T>("x1_trans", 1);
  print_ldmatrix<cute::SM75_U16x4_LDSM_T>("x2_trans", 2);
  print_ldmatrix<cute::SM75_U16x8_LDSM_T>("x4_trans", 4);
}
