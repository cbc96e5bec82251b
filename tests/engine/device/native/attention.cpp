// Compares attention with sums in double, for every precision of the cache. Prints what differs.

#include <cstdio>
#include <random>

#include "attention.h"

using namespace nvium;

// One lost key of 690 would change what a query attends by about 1 / 690, and roundings to bfloat16 average out.
constexpr double kTolerance = 0.02;

template <typename C> void check(const char* name, int64_t kind, int64_t window, int64_t size) {
  constexpr int64_t kHeads = 4, kKeyHeads = 2, kPage = 16, kPages = 44;
  const std::vector<int64_t> positions{0, 1, 2, 254, 255, 256, 511, 690}, calls(positions.size());
  const int64_t num_rows = positions.size();
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<C> keys(kPages * kKeyHeads * kPage * size + lanes<float>), values(keys.size());
  for (auto* each : {&keys, &values})
    for (C& number : *each) number = static_cast<C>(normal(random));
  std::vector<float> queries(num_rows * kHeads * size), attended(queries.size());
  for (float& number : queries) number = normal(random);
  std::vector<int64_t> pages(kPages);
  for (int64_t i = 0; i < kPages; ++i) pages[i] = kPages - 1 - i;
  Seat seat{};
  seat.pages = pages.data();
  std::vector<Row> rows;
  for (const int64_t position : positions) rows.push_back({position, &seat, 0, true});
  const Cache cache{kind, kPage, 1, 1, kKeyHeads, size, keys.data(), values.data()};
  const double scale = 1 / std::sqrt(static_cast<double>(size));
  Attention<float, C>{cache, 2, kHeads, num_rows, rows.data(), calls.data(), window, static_cast<float>(scale), 0,
                      queries.data(), attended.data()}.run();
  for (int64_t i = 0; i < num_rows * kHeads; ++i) {
    const int64_t last = positions[i / kHeads], first = window ? std::max<int64_t>(last - window + 1, 0) : 0;
    std::vector<double> sums(size);
    double total = 0;
    for (int64_t key = first; key <= last; ++key) {
      const int64_t page = (pages[key / kPage] * kKeyHeads + i % kHeads / (kHeads / kKeyHeads)) * kPage * size;
      double score = 0;
      for (int64_t p = 0; p < size; ++p)
        score += queries[i * size + p] * static_cast<double>(static_cast<float>(keys[page + p * kPage + key % kPage]));
      total += std::exp(scale * score);
      for (int64_t p = 0; p < size; ++p)
        sums[p] += std::exp(scale * score) * static_cast<float>(values[page + key % kPage * size + p]);
    }
    for (int64_t p = 0; p < size; ++p)
      if (!(std::abs(attended[i * size + p] - sums[p] / total) < kTolerance / std::sqrt(last - first + 1)))
        return void(std::printf("%s, window %d, size %d: position %d\n", name, int(window), int(size), int(last)));
  }
}

int main() {
  for (int64_t window : {0, 3, 300})
    for (int64_t size : {24, 64}) {
      check<float>("float32", kStoredF32, window, size);
      check<Half>("float16", kStoredF16, window, size);
      check<BFloat16>("bfloat16", kStoredBF16, window, size);
    }
}
