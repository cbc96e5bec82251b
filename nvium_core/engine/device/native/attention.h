// Causal attention over the paged cache. Keys and values are rounded once, when they are written; every row reads them
// rounded, its own too. Query heads of one key head attend together, so a key is read once for all of them. A row reads
// blocks of keys with a running maximum and sum (FlashAttention, arXiv 2205.14135). Blocks begin at fixed positions, so
// if all values are finite, a row's results depend neither on the other rows nor on the number of threads.
//
// Processors that multiply pairs of bfloat16 numbers (AVX-512 BF16) do so if the cache has such numbers and a head is whole
// vectors: twice as fast. Then queries and e^(score - maximum) are rounded to bfloat16 too, but not the sum of the latter.
//
// Shapes: R rows, H query heads, M rows times the query heads of a task; others as in call.h.
#pragma once

#include <limits>
#include <vector>

#include "call.h"
#include "thread_pool.h"

namespace nvium {

// A row of a sequence, the block that it passes, and whether its state after the block is read.
struct Row {
  int64_t position;
  const Seat* seat;
  int64_t block;
  bool is_read;
};

struct Range {
  int64_t begin, end;
};

constexpr int64_t kGroupRows = 64;                   // maximum rows of a sequence that attend together
constexpr int64_t kBlockKeys = 256;                  // minimum keys of a block, which has whole pages
constexpr int kTileRows = kRegisters == 32 ? 4 : 2;  // M to process at once, so that their sums fit in registers
constexpr int kTileVectors = 4;                      // vectors to process at once
constexpr int kFewQueries = 2 * kTileRows;           // maximum M for which pairs of a block are not copied to memory

// Call use(C{}) with the type C of the cache's numbers.
template <typename A, typename Use> void with_cached(const Cache& cache, Use&& use) {
  if constexpr (std::is_same_v<A, double>)
    use(double{});
  else if (cache.kind == kStoredBF16)
    use(BFloat16{});
  else if (cache.kind == kStoredF16)
    use(Half{});
  else
    use(float{});
}

// Rows that attend, each in one call of a layer.
template <typename A, typename C> struct Attention {
  const Cache& cache_;
  int64_t num_threads_, num_heads_, num_rows_;
  const Row* rows_;
  const int64_t* calls_;  // [R]: each row's call in the cache
  int64_t window_;        // number of last positions, with its own, that a row attends to; 0: all
  A scale_, cap_;         // of the products of queries and keys; cap 0: none
  const A* queries_;      // [R, H, P]
  A* attended_;           // [R, H, P]
  const int64_t block_ = (kBlockKeys + cache_.page_size - 1) / cache_.page_size * cache_.page_size;  // keys of a block
  const int64_t stride_ = block_ + lanes<A>;  // from one query's scores to the next's, with room for a last whole vector
  const int64_t width_ = (cache_.head_size + lanes<A> - 1) / lanes<A> * lanes<A>;  // numbers of a head, up to whole vectors
  static constexpr bool kMayPair = kVectorBytes == 64 && std::is_same_v<A, float> && std::is_same_v<C, BFloat16>;
  const bool uses_pairs_ = kMayPair && kHasPairs && cache_.head_size % lanes<A> == 0;

  // Write a row's keys and values [G, P].
  void write(int64_t row, const A* own_keys, const A* own_values) const {
    const int64_t position = rows_[row].position, at = position % cache_.page_size, size = cache_.head_size;
    for (int64_t head = 0; head < cache_.num_heads; ++head, own_keys += size, own_values += size) {
      C* const keys = page(cache_.keys, row, position, head) + at;
      C* const values = page(cache_.values, row, position, head) + at * size;
      for (int64_t p = 0; p < size; ++p) keys[p * cache_.page_size] = static_cast<C>(own_keys[p]);
      for (int64_t p = 0; p < size; ++p) values[p] = static_cast<C>(own_values[p]);
    }
  }

  // Attend in groups of rows of one sequence and block. A task has a group's heads of one key head, or some of them.
  void run() const {
    std::vector<int64_t> firsts;
    const auto is_other = [&](const Row& a, const Row& b) { return a.seat != b.seat || a.block != b.block; };
    for (int64_t r = 0; r < num_rows_; ++r)
      if (!r || r - firsts.back() == kGroupRows || is_other(rows_[r], rows_[firsts.back()])) firsts.push_back(r);
    firsts.push_back(num_rows_);
    const int64_t heads = num_heads_, shared = heads / cache_.num_heads;
    ThreadPool::shared().run(num_threads_, (firsts.size() - 1) * heads, [&](int64_t begin, int64_t end) {
      for (int64_t stop; begin < end; begin = stop) {
        const int64_t group = begin / heads, head = begin % heads;
        stop = std::min(end, (begin / shared + 1) * shared);
        attend({firsts[group], firsts[group + 1]}, {head, head + stop - begin});
      }
    });
  }

 private:
  // Rows and query heads that attend to the same keys: query m is of row m / num_heads.
  struct Task {
    Range rows;
    int64_t first_head, num_heads, num_queries;
  };

  // A vector of keys, and the first key's number in the block.
  struct KeyVector {
    const C* keys;
    int64_t first;
  };

  // Pairs of a query's numbers [M, P / 2], and of a block's: keys [vectors, P / 2, lanes], values [keys / 2, P].
  struct Paired {
    std::vector<BFloat16Pair> queries, keys, values;
  };

  // A query's maximum so far, and the sum of e^(score - maximum).
  struct Softmax {
    A most = std::numeric_limits<A>::lowest(), sum = 0;
  };

  int64_t num_keys(int64_t row) const { return rows_[row].position + 1; }

  int64_t first_key(int64_t row) const { return window_ ? std::max(num_keys(row) - window_, int64_t{0}) : 0; }

  // Return where the page with this position has the keys [P, page size] or values [page size, P] of a head.
  C* page(void* cache, int64_t row, int64_t position, int64_t head) const {
    const int64_t number = rows_[row].seat->pages[position / cache_.page_size];
    const int64_t heads_before = (number * cache_.num_calls + calls_[row]) * cache_.num_heads + head;
    return static_cast<C*>(cache) + heads_before * cache_.page_size * cache_.head_size;
  }

  int64_t at(const Task& task, int64_t m) const {  // in queries and attended
    const int64_t row = task.rows.begin + m / task.num_heads, head = task.first_head + m % task.num_heads;
    return (row * num_heads_ + head) * cache_.head_size;
  }

  void attend(Range rows, Range heads) const {
    const int64_t num_heads = heads.end - heads.begin;
    const Task task{rows, heads.begin, num_heads, (rows.end - rows.begin) * num_heads};
    static thread_local std::vector<A> scores, attended;
    static thread_local std::vector<Softmax> sums;
    static thread_local std::vector<const C*> keys, values;
    static thread_local Paired paired;
    scores.resize(task.num_queries * stride_);
    sums.assign(task.num_queries, Softmax{});
    attended.assign(task.num_queries * width_, A{0});
    if constexpr (kMayPair)
      if (uses_pairs_) pair_queries(task, paired);
    const int64_t key_head = heads.begin * cache_.num_heads / num_heads_, most = num_keys(rows.end - 1);
    int64_t first = first_key(rows.begin) / block_ * block_;
    load_pages(cache_.keys, task, key_head, {first, most}, keys);
    for (; first < most; first += block_) {
      const int64_t count = std::min(block_, most - first);
      load_pages(cache_.values, task, key_head, {first, most}, values);
      score(task, keys, count, scores.data(), paired);
      for (int64_t m = 0; m < task.num_queries; ++m) {
        const int64_t row = rows.begin + m / num_heads;
        A* const own = &scores[m * stride_];
        exponentiate(row, {first, first + count}, own, sums[m], &attended[m * width_]);
        if constexpr (kMayPair)
          if (uses_pairs_) round_weights(own, count);
      }
      load_pages(cache_.keys, task, key_head, {first + block_, most}, keys);
      if constexpr (kMayPair)
        if (uses_pairs_) {
          add_pairs(task, values, count, scores.data(), attended.data(), paired);
          continue;
        }
      add_vectors(task, scores.data(), attended.data(), [&](auto&& use) {
        each_value(values, count, [&](int64_t key, const C* value) { use(key, [=](int64_t p) { return load(value + p); }); });
      });
    }
    for (int64_t m = 0; m < task.num_queries; ++m) {
      multiply(&attended[m * width_], 1 / sums[m].sum);
      std::copy_n(&attended[m * width_], cache_.head_size, attended_ + at(task, m));
    }
  }

  // List the pages of the block that begins with these keys. Unless there is only one block, load a line of each page in
  // turn: the processor then prefetches several pages at once.
  void load_pages(void* cache, const Task& task, int64_t head, Range keys, std::vector<const C*>& pages) const {
    pages.clear();
    const int64_t end = std::min(keys.begin + block_, keys.end);
    for (int64_t key = keys.begin; key < end; key += cache_.page_size)
      pages.push_back(page(cache, task.rows.begin, key, head));
    if (keys.end <= block_) return;
    for (int64_t i = 0; i < cache_.page_size * cache_.head_size; i += 64 / sizeof(C))
      for (const C* each : pages) static_cast<void>(*reinterpret_cast<const volatile char*>(each + i));
  }

  // Call use(number, first) for tiles of `Size` of `count` things, and then for single ones. `number` is a constant.
  template <int Size, typename Use> static void tiles(int64_t count, Use&& use) {
    int64_t i = 0;
    for (; i + Size <= count; i += Size) use(std::integral_constant<int, Size>{}, i);
    for (; i < count; ++i) use(std::integral_constant<int, 1>{}, i);
  }

  // Compute the scores [M, block]. A page's last vector may read numbers behind the page. The scores that it writes from
  // them are overwritten by the next page's, or never read.
  void score(const Task& task, const std::vector<const C*>& pages, int64_t count, A* scores, Paired& paired) const {
    static thread_local std::vector<KeyVector> vectors;
    vectors.clear();
    for (int64_t first = 0; first < count; first += cache_.page_size)
      for (int64_t k = 0; k < std::min(cache_.page_size, count - first); k += lanes<A>)
        vectors.push_back({pages[first / cache_.page_size] + k, first + k});
    const int64_t size = cache_.head_size, stride = cache_.page_size, num_vectors = vectors.size();
    if constexpr (kMayPair)
      if (uses_pairs_) {
        const auto query = [&](int64_t m) -> const BFloat16Pair* { return &paired.queries[m * size / 2]; };
        const auto from_of = [&](int64_t v) { return vectors[v].keys; };
        const auto pairs = [=](const C* from, int64_t p) { return pairs_of(from + 2 * p * stride, from + (2 * p + 1) * stride); };
        if (task.num_queries <= kFewQueries) return multiply_keys(task, vectors, size / 2, scores, query, from_of, pairs);
        paired.keys.resize(num_vectors * size / 2 * lanes<A>);
        const auto to_of = [&](int64_t v) { return &paired.keys[v * size / 2 * lanes<A>]; };
        for (int64_t v = 0; v < num_vectors; ++v)
          for (int64_t p = 0; p < size / 2; ++p) store(pairs(from_of(v), p), to_of(v) + p * lanes<A>);
        return multiply_keys(task, vectors, size / 2, scores, query, to_of,
                             [](const BFloat16Pair* from, int64_t p) { return load(from + p * lanes<A>); });
      }
    multiply_keys(task, vectors, size, scores, [&](int64_t m) { return queries_ + at(task, m); },
                  [&](int64_t v) { return vectors[v].keys; }, [=](const C* from, int64_t p) { return load(from + p * stride); });
  }

  // query(m): the numbers, or pairs, of query m. depth: how many. keys(from(v), p): number or pair p of the keys of vector v.
  template <typename Query, typename From, typename Keys>
  void multiply_keys(const Task& task, const std::vector<KeyVector>& vectors, int64_t depth, A* scores, Query&& query,
                     From&& from, Keys&& keys) const {
    tiles<kTileRows>(task.num_queries, [&](auto num_rows, int64_t m) {
      constexpr int R = num_rows;
      decltype(query(m)) queries[R];
      const A scale = scale_;
      A* rows[R];
      for (int r = 0; r < R; ++r) queries[r] = query(m + r), rows[r] = scores + (m + r) * stride_;
      tiles<kTileVectors>(vectors.size(), [&](auto num_vectors, int64_t first) {
        constexpr int N = num_vectors;
        decltype(from(0)) own[N];
        for (int n = 0; n < N; ++n) own[n] = from(first + n);
        Vector<A> sums[R][N]{};
        for (int64_t p = 0; p < depth; ++p)
          for (int n = 0; n < N; ++n) {
            const auto key = keys(own[n], p);
            for (int r = 0; r < R; ++r) sums[r][n] = plus_products(sums[r][n], queries[r][p], key);
          }
        for (int r = 0; r < R; ++r)
          for (int n = 0; n < N; ++n) store(scale * sums[r][n], rows[r] + vectors[first + n].first);
      });
    });
  }

  // Replace a row's scores of these keys by e^(score - maximum), or 0. If the maximum grows, scale what has been attended.
  void exponentiate(int64_t row, Range keys, A* scores, Softmax& sums, A* attended) const {
    const int64_t count = keys.end - keys.begin, begin = std::clamp(first_key(row) - keys.begin, int64_t{0}, count);
    const int64_t own = std::clamp(num_keys(row) - keys.begin, begin, count) - begin;
    std::fill_n(scores, begin, A{0});
    std::fill(scores + begin + own, scores + count, A{0});
    if (!own) return;
    scores += begin;
    if (cap_) limit(scores, cap_, own);
    if (const A most = largest(scores, own); most > sums.most) {
      const A factor = exp(Vector<A>{} + (sums.most - most))[0];
      sums = {most, sums.sum * factor};
      multiply(attended, factor);
    }
    sums.sum += exponentials(scores, sums.most, own);
  }

  void multiply(A* head, A factor) const {
    for (int64_t p = 0; p < width_; ++p) head[p] *= factor;
  }

  // Add weighted values to `attended` [M, width_]. each(use) calls use(i, values) for keys, or pairs of keys, with the weight
  // i. values(p): a vector from p on. The last may read numbers behind the head; what is summed from them is never read.
  template <typename W, typename Each>
  void add_vectors(const Task& task, const W* weights, A* attended, Each&& each) const {
    tiles<kTileRows>(task.num_queries, [&](auto num_rows, int64_t m) {
      constexpr int R = num_rows;
      const W* own = weights + m * stride_;
      A* const to = attended + m * width_;
      tiles<kTileVectors>(width_ / lanes<A>, [&](auto num_vectors, int64_t first) {
        constexpr int N = num_vectors;
        Vector<A> sums[R][N];
        for (int r = 0; r < R; ++r)
          for (int n = 0; n < N; ++n) sums[r][n] = load(to + r * width_ + (first + n) * lanes<A>);
        each([&](int64_t i, auto&& values) {
          for (int n = 0; n < N; ++n) {
            const auto v = values((first + n) * lanes<A>);
            for (int r = 0; r < R; ++r) sums[r][n] = plus_products(sums[r][n], own[r * stride_ + i], v);
          }
        });
        for (int r = 0; r < R; ++r)
          for (int n = 0; n < N; ++n) store(sums[r][n], to + r * width_ + (first + n) * lanes<A>);
      });
    });
  }

  template <typename Use> void each_value(const std::vector<const C*>& pages, int64_t count, Use&& use) const {
    for (int64_t key = 0; key < count;) {
      const C* value = pages[key / cache_.page_size];
      const int64_t end = std::min(key + cache_.page_size, count);
      for (; key < end; ++key, value += cache_.head_size) use(key, value);
    }
  }

  void pair_queries(const Task& task, Paired& out) const {
    out.queries.resize(task.num_queries * cache_.head_size / 2);
    BFloat16Pair* to = out.queries.data();
    for (int64_t m = 0; m < task.num_queries; ++m, to += cache_.head_size / 2)
      round_to_pairs(queries_ + at(task, m), cache_.head_size, to);
  }

  // Round weights in their place. If their number is odd, a weight of 0 follows the last.
  static void round_weights(A* weights, int64_t count) {
    weights[count] = 0;
    round_to_pairs(weights, count + 1, weights);
  }

  // The last value of an odd number is paired with itself.
  void add_pairs(const Task& task, const std::vector<const C*>& pages, int64_t count, const A* weights, A* attended,
                 Paired& out) const {
    const int64_t size = cache_.head_size;
    const auto* const weight_pairs = reinterpret_cast<const BFloat16Pair*>(weights);
    const auto each_pair = [&](auto&& use) {
      const C* before = nullptr;
      each_value(pages, count, [&](int64_t key, const C* value) {
        const C* const first = key % 2 ? before : value;
        if (key % 2 || key == count - 1) use(key / 2, [=](int64_t p) { return pairs_of(first + p, value + p); });
        before = value;
      });
    };
    if (task.num_queries <= kFewQueries) return add_vectors(task, weight_pairs, attended, each_pair);
    out.values.resize((count + 1) / 2 * size);
    each_pair([&](int64_t i, auto&& values) {
      for (int64_t p = 0; p < size; p += lanes<A>) store(values(p), &out.values[i * size + p]);
    });
    add_vectors(task, weight_pairs, attended, [&](auto&& use) {
      const BFloat16Pair* from = out.values.data();
      for (int64_t i = 0; i < (count + 1) / 2; ++i, from += size) use(i, [=](int64_t p) { return load(from + p); });
    });
  }
};

}  // namespace nvium
