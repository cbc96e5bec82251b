// Compares the products of every quantized type with sums in double, and with themselves for other numbers of rows.

#include "products.h"

using namespace nvium;

namespace {

constexpr int64_t kRows = 71;

bool is_right(int64_t kind) {
  const RandomMatrix weights(kind);
  std::vector<float> x = drawn(kRows * kLength);
  std::fill_n(x.begin(), 32, 0.0f), std::fill_n(x.begin() + 32, 32, 1e-31f);
  const auto multiply = [&](const float* of, int64_t num_rows) {
    Forms forms;
    std::vector<float> y(num_rows * kCount);
    const Operand<float> rows = operand(2, of, num_rows, kLength, {weights.matrix()}, 0, forms);
    project_into(rows, weights.matrix(), kCount, 0, num_panels<float>(kCount), y.data());
    return y;
  };
  const std::vector<float> y = multiply(x.data(), kRows);
  if (!(weights.difference(rounded(x, 32), y) < 2e-6)) return false;
  for (int64_t r = 0; r < kRows; ++r) {
    const std::vector<float> few = multiply(&x[r * kLength], std::min(1 + r % 5, kRows - r));
    if (std::memcmp(few.data(), &y[r * kCount], kCount * sizeof(float))) return false;
  }
  x[5] = NAN;
  const std::vector<float> invalid = multiply(x.data(), 1);
  return std::all_of(invalid.begin(), invalid.end(), [](float each) { return std::isnan(each); });
}

}  // namespace

int main() {
  for (int64_t kind : {kQ4_0, kQ4_1, kQ5_0, kQ5_1, kQ8_0, kQ2_K, kQ3_K, kQ4_K, kQ5_K, kQ6_K, kIQ4_NL, kIQ4_XS})
    if (!is_right(kind)) std::printf("type %d\n", static_cast<int>(kind));
}
