// Compares attention with sums in double, and rows alone with rows in company, for every precision of the cache. Prints
// what differs.

#include <cstdio>
#include <random>

#include "attention.h"

using namespace nvium;

// One lost key of 690 would change what a query attends by about 1 / 690, and roundings to bfloat16 average out.
constexpr double kTolerance = 0.02;

template <typename C> void check(const char* name, int64_t kind, int64_t window, float cap, int64_t size, int64_t page_size) {
  constexpr int64_t kHeads = 4, kKeyHeads = 2;
  const int64_t num_pages = 690 / page_size + 1;
  std::vector<int64_t> positions{0, 1, 2, 254, 255, 256, 257, 258, 511};
  for (int64_t i = 0; i < kGroupRows; ++i) positions.push_back(600 + i);  // more rows than attend together
  positions.push_back(690);
  const std::vector<int64_t> calls(positions.size());
  const int64_t num_rows = positions.size();
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<C> keys(num_pages * kKeyHeads * page_size * size + lanes<float>), values(keys.size());
  for (auto* each : {&keys, &values})
    for (C& number : *each) number = static_cast<C>(normal(random));
  std::vector<float> queries(num_rows * kHeads * size), attended(queries.size());
  for (float& number : queries) number = normal(random) / 4;  // so that no few keys have most of the weight
  std::vector<int64_t> pages(num_pages);
  for (int64_t i = 0; i < num_pages; ++i) pages[i] = num_pages - 1 - i;
  Seat seat{};
  seat.pages = pages.data();
  std::vector<Row> rows;
  for (const int64_t position : positions) rows.push_back({position, &seat, 0, true});
  const Cache cache{kind, page_size, 1, 1, kKeyHeads, size, keys.data(), values.data()};
  const double scale = 1 / std::sqrt(static_cast<double>(size));
  const auto attend = [&](int64_t first, int64_t count, std::vector<float>& out) {
    const int64_t before = first * kHeads * size;
    Attention<float, C>{cache, 2, kHeads, count, &rows[first], calls.data(), window, static_cast<float>(scale), cap,
                        &queries[before], &out[before]}.run();
  };
  std::vector<float> alone(queries.size());
  attend(0, num_rows, attended);
  for (int64_t r = 0; r < num_rows; ++r) attend(r, 1, alone);
  if (alone != attended) std::printf("%s, window %d, size %d, page %d: company\n", name, int(window), int(size), int(page_size));
  for (int64_t i = 0; i < num_rows * kHeads; ++i) {
    const int64_t last = positions[i / kHeads], first = window ? std::max<int64_t>(last - window + 1, 0) : 0;
    std::vector<double> sums(size);
    double total = 0;
    for (int64_t key = first; key <= last; ++key) {
      const int64_t page = (pages[key / page_size] * kKeyHeads + i % kHeads / (kHeads / kKeyHeads)) * page_size * size;
      double score = 0;
      for (int64_t p = 0; p < size; ++p)
        score += queries[i * size + p] * static_cast<double>(static_cast<float>(keys[page + p * page_size + key % page_size]));
      const double weight = std::exp(cap ? cap * std::tanh(scale * score / cap) : scale * score);
      total += weight;
      for (int64_t p = 0; p < size; ++p)
        sums[p] += weight * static_cast<float>(values[page + key % page_size * size + p]);
    }
    for (int64_t p = 0; p < size; ++p)
      if (!(std::abs(attended[i * size + p] - sums[p] / total) < kTolerance / std::sqrt(last - first + 1)))
        return void(std::printf("%s, window %d, size %d, page %d: position %d\n", name, int(window), int(size), int(page_size),
                                int(last)));
  }
}

int main() {
  for (const auto& [window, cap] : {std::pair(0, 0.0f), {3, 0.0f}, {300, 0.5f}})
    for (int64_t size : {27, 64})
      for (int64_t page_size : {5, 16, 37}) {
        check<float>("float32", kStoredF32, window, cap, size, page_size);
        check<Half>("float16", kStoredF16, window, cap, size, page_size);
        check<BFloat16>("bfloat16", kStoredBF16, window, cap, size, page_size);
      }
}
