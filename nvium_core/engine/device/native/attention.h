// Causal attention over the paged cache. Keys and values are rounded once, when they are written; every row reads them
// rounded, its own too. So a row's results depend neither on the other rows nor on the number of threads.
//
// Shapes: R rows, H query heads; others as in call.h.
#pragma once

#include <vector>

#include "call.h"
#include "thread_pool.h"

namespace nvium {

// A row of a sequence, and the block that it passes.
struct Row {
  int64_t position;
  const Seat* seat;
  int64_t block;
};

// Rows that attend, each in one call of a layer.
template <typename A> struct Attending {
  int64_t num_threads, num_heads, num_rows;
  const Row* rows;
  const int64_t* calls;  // [R]: where the cache has the keys of each row's call
  int64_t window;        // number of last positions, with its own, that a row attends to; 0: all
  A scale, cap;          // of the products of queries and keys; cap 0: none
  const A* queries;      // [R, H, P]
  A* attended;           // [R, H, P]
};

struct Range {
  int64_t begin, end;
};

constexpr int64_t kGroupRows = 32;                   // maximum rows of a sequence that attend together
constexpr int64_t kReadAheadBytes = 128 << 10;       // bytes of keys or values to load into the L2 cache in advance
constexpr int64_t kPagesAtOnce = 8;                  // maximum pages to load at once; with 16 the gain is less
constexpr int kTileRows = kRegisters == 32 ? 4 : 2;  // rows to process at once, so that their sums fit in registers

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

template <typename A, typename C> class Attention {
 public:
  Attention(const Cache& cache, const Attending<A>& all)
      : cache_(cache), all_(all), slot_stride_(cache.num_heads * cache.head_size) {}

  // Write a row's keys and values [G, P].
  void write(int64_t row, const A* own_keys, const A* own_values) const {
    const int64_t at = slot(row, all_.rows[row].position) * slot_stride_;
    for (int64_t i = 0; i < slot_stride_; ++i) keys_of(row)[at + i] = static_cast<C>(own_keys[i]);
    for (int64_t i = 0; i < slot_stride_; ++i) values_of(row)[at + i] = static_cast<C>(own_values[i]);
  }

  // Attend in groups of rows of one sequence and block, so that each key and value is read once per group. The fewer rows
  // a group has, the more heads one task processes.
  void run() const {
    std::vector<int64_t> firsts;
    const auto is_other = [&](const Row& a, const Row& b) { return a.seat != b.seat || a.block != b.block; };
    for (int64_t r = 0; r < all_.num_rows; ++r)
      if (!r || r - firsts.back() == kGroupRows || is_other(all_.rows[r], all_.rows[firsts.back()])) firsts.push_back(r);
    firsts.push_back(all_.num_rows);
    std::fill_n(all_.attended, all_.num_rows * all_.num_heads * cache_.head_size, A{0});
    const int64_t heads = all_.num_heads;
    ThreadPool::shared().run(all_.num_threads, (firsts.size() - 1) * heads, [&](int64_t begin, int64_t end) {
      for (int64_t stop; begin < end; begin = stop) {
        const int64_t group = begin / heads, head = begin % heads;
        const Range rows{firsts[group], firsts[group + 1]};
        stop = std::min({end, (group + 1) * heads, begin + kGroupRows / (rows.end - rows.begin)});
        attend_heads(rows, {head, head + stop - begin});
      }
    });
  }

 private:
  int64_t num_keys(int64_t row) const { return all_.rows[row].position + 1; }

  int64_t first_key(int64_t row) const { return all_.window ? std::max(num_keys(row) - all_.window, int64_t{0}) : 0; }

  int64_t slot(int64_t row, int64_t at) const { return all_.rows[row].seat->slot(at, cache_.page_size); }

  // Return where the keys or values of the row's call begin.
  C* keys_of(int64_t row) const { return static_cast<C*>(cache_.keys) + offset(row); }
  C* values_of(int64_t row) const { return static_cast<C*>(cache_.values) + offset(row); }
  int64_t offset(int64_t row) const { return all_.calls[row] * cache_.num_slots * slot_stride_; }

  void attend_heads(Range rows, Range heads) const {
    static thread_local std::vector<A> scratch;
    int64_t most = 0;
    for (int64_t r = rows.begin; r < rows.end; ++r) most = std::max(most, num_keys(r));
    const int64_t first = first_key(rows.begin) / cache_.page_size * cache_.page_size;  // weights begin at this key
    const int64_t stride = most - first + lanes<A>, head_stride = (rows.end - rows.begin) * stride;
    scratch.resize((heads.end - heads.begin) * head_stride);
    const auto each_head = [&](auto&& use) {
      for (int64_t head = heads.begin; head < heads.end; ++head) use(head, &scratch[(head - heads.begin) * head_stride]);
    };
    const Range keys{first, most};
    each_page(rows.begin, keys, heads, keys_of(rows.begin), [&](int64_t key, int64_t count, const C* page) {
      each_head([&](int64_t head, A* weights) {
        score_page(rows, head, page + column(head), count, weights + key - first, stride);
      });
    });
    each_head([&](int64_t, A* weights) {
      for (int64_t r = rows.begin; r < rows.end; ++r, weights += stride) {
        A* const own = std::fill_n(weights, first_key(r) - first, A{0});
        const int64_t count = num_keys(r) - first_key(r);
        if (all_.cap) limit(own, all_.cap, count);
        own[count] = 1 / exponentials(own, largest(own, count), count);
      }
    });
    each_page(rows.begin, keys, heads, values_of(rows.begin), [&](int64_t key, int64_t count, const C* page) {
      each_head([&](int64_t head, const A* weights) {
        int64_t r = rows.begin;
        weights += key - first;
        for (; r + kTileRows <= rows.end; r += kTileRows, weights += kTileRows * stride)
          add_values<kTileRows>(r, head, page + column(head), key, count, weights, stride);
        for (; r < rows.end; ++r, weights += stride)
          add_values<1>(r, head, page + column(head), key, count, weights, stride);
      });
    });
    each_head([&](int64_t head, const A* weights) {
      for (int64_t r = rows.begin; r < rows.end; ++r, weights += stride)
        for (int64_t p = 0; p < cache_.head_size; ++p) attended(r, head)[p] *= weights[num_keys(r) - first];
    });
  }

  // Call use(key, count, slots) for each page. Pages are loaded into the L2 cache beforehand, because `use` reads head by
  // head, an order that the processor does not prefetch.
  template <typename Use> void each_page(int64_t row, Range keys, Range heads, const C* cache, Use&& use) const {
    const int64_t first = column(heads.begin), width = column(heads.end - 1) + cache_.head_size - first;
    const int64_t page_size = cache_.page_size, page_bytes = page_size * width * sizeof(C);
    const int64_t ahead = std::clamp(kReadAheadBytes / page_bytes, int64_t{1}, kPagesAtOnce) * page_size;
    for (int64_t key = keys.begin; key < keys.end; key += page_size) {
      if ((key - keys.begin) % ahead == 0) load_pages(row, {key, std::min(key + ahead, keys.end)}, cache + first, width);
      use(key, std::min(page_size, keys.end - key), cache + slot(row, key) * slot_stride_);
    }
  }

  // Load the pages of these keys, one line of each in turn. A processor prefetches slowly at the start of a page, but it
  // prefetches several pages at once.
  void load_pages(int64_t row, Range keys, const C* cache, int64_t width) const {
    const int64_t page_size = cache_.page_size;
    const C* pages[kPagesAtOnce];
    for (int64_t key = keys.begin, page = 0; key < keys.end; key += page_size)
      pages[page++] = cache + slot(row, key) * slot_stride_;
    for (int64_t i = 0, key = keys.begin; i < page_size && key < keys.end; ++i, ++key) {
      const int64_t num_pages = (keys.end - key + page_size - 1) / page_size;  // that have an i-th key
      for (int64_t p = i * slot_stride_; p < i * slot_stride_ + width; p += 64 / sizeof(C))
        for (int64_t page = 0; page < num_pages; ++page)
          static_cast<void>(*reinterpret_cast<const volatile char*>(pages[page] + p));
    }
  }

  int64_t column(int64_t head) const { return head * cache_.num_heads / all_.num_heads * cache_.head_size; }

  const A* query(int64_t row, int64_t head) const {
    return &all_.queries[(row * all_.num_heads + head) * cache_.head_size];
  }

  A* attended(int64_t row, int64_t head) const {
    return &all_.attended[(row * all_.num_heads + head) * cache_.head_size];
  }

  void score_page(Range rows, int64_t head, const C* keys, int64_t count, A* scores, int64_t stride) const {
    const A scale = all_.scale;
    for (; count >= lanes<A>; count -= lanes<A>, keys += lanes<A> * slot_stride_, scores += lanes<A>)
      score_keys(rows.begin, rows.end, head, keys, scale, scores, stride);
    for (int64_t key = 0; key < count; ++key)
      for (int64_t r = rows.begin; r < rows.end; ++r)
        scores[(r - rows.begin) * stride + key] =
            scale * dot(query(r, head), keys + key * slot_stride_, cache_.head_size);
  }

  // Compute the attention scores of `lanes` consecutive keys of a page.
  void score_keys(int64_t row, int64_t end, int64_t head, const C* keys, A scale, A* scores, int64_t stride) const {
    const int64_t size = cache_.head_size;
    if (end - row >= kTileRows) {
      static thread_local std::vector<A> tile;
      tile.resize(size * lanes<A>);
      transpose(keys, slot_stride_, size, tile.data());
      for (; row + kTileRows <= end; row += kTileRows, scores += kTileRows * stride) {
        const A* queries[kTileRows];
        Vector<A> sums[kTileRows];
        for (int r = 0; r < kTileRows; ++r) queries[r] = query(row + r, head);
        products_of_tile(queries, tile.data(), size, sums);
        for (int r = 0; r < kTileRows; ++r) store(scale * sums[r], scores + r * stride);
      }
    }
    for (; row < end; ++row, scores += stride)
      store(scale * products(query(row, head), keys, slot_stride_, size), scores);
  }

  // Add the weighted values of `count` keys, from `key` on, to the sums of R rows. Their weights are `stride` apart.
  template <int R>
  void add_values(
      int64_t row, int64_t head, const C* values, int64_t key, int64_t count, const A* weights, int64_t stride) const {
    int64_t p = 0;
    for (; p + 4 * lanes<A> <= cache_.head_size; p += 4 * lanes<A>)
      add_vectors<R, 4>(row, head, values, key, count, weights, stride, p);
    for (; p + lanes<A> <= cache_.head_size; p += lanes<A>)
      add_vectors<R, 1>(row, head, values, key, count, weights, stride, p);
    for (; p < cache_.head_size; ++p)
      for (int r = 0; r < R; ++r)
        for (int64_t i = 0; i < std::min(count, num_keys(row + r) - key); ++i)
          attended(row + r, head)[p] += weights[r * stride + i] * static_cast<A>(values[i * slot_stride_ + p]);
  }

  // Do the same as `add_values` for N vectors from element p on. First come the keys to which all R rows attend.
  template <int R, int N>
  void add_vectors(
      int64_t row, int64_t head, const C* values, int64_t key, int64_t count, const A* weights, int64_t stride,
      int64_t p) const {
    Vector<A> sums[R][N];
    int64_t shared = count;
    for (int r = 0; r < R; ++r) {
      for (int n = 0; n < N; ++n) sums[r][n] = load(attended(row + r, head) + p + n * lanes<A>);
      shared = std::min(shared, std::max(num_keys(row + r) - key, int64_t{0}));
    }
    for (int64_t i = 0; i < shared; ++i)
      for (int n = 0; n < N; ++n) {
        const Vector<A> value = load(values + i * slot_stride_ + p + n * lanes<A>);
        for (int r = 0; r < R; ++r) sums[r][n] += weights[r * stride + i] * value;
      }
    for (int r = 0; r < R; ++r) {
      for (int64_t i = shared; i < std::min(count, num_keys(row + r) - key); ++i)
        for (int n = 0; n < N; ++n)
          sums[r][n] += weights[r * stride + i] * load(values + i * slot_stride_ + p + n * lanes<A>);
      for (int n = 0; n < N; ++n) store(sums[r][n], attended(row + r, head) + p + n * lanes<A>);
    }
  }

  const Cache& cache_;
  const Attending<A>& all_;
  const int64_t slot_stride_;
};

}  // namespace nvium
