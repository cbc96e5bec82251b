// Runs rows of any sequences through one block of a Llama or a related model, with a paged key/value cache. It does the
// same as the layers in nvium_core/model/llama.py, without the overhead of PyTorch's operators. Rows may pass different
// blocks if these call the same layers.
//
// Weights are read once for all rows. Activations inside the block are float32 or better; rounded.h rounds them for
// quantized matrices. A row's results do not depend on the other rows or on the number of threads.
//
// Shapes: R rows, H query heads; others as in call.h.
#pragma once

#include <vector>

#include "call.h"

namespace nvium {

// A row of a sequence, and the block that it passes.
struct Row {
  int64_t position;
  const Seat* seat;
  int64_t block;
};

struct Range {
  int64_t begin, end;
};

constexpr int64_t kGroupRows = 32;                   // maximum rows of a sequence that attend together
constexpr int64_t kReadAheadBytes = 128 << 10;       // bytes of keys or values to load into the L2 cache in advance
constexpr int64_t kPagesAtOnce = 8;                  // maximum pages to load at once; with 16 the gain is less
constexpr int kTileRows = kRegisters == 32 ? 4 : 2;  // rows to process at once, so that their sums fit in registers

template <typename T> class BlockForward {
  using A = Accumulator<T>;

 public:
  BlockForward(const Model<T>& model, const std::vector<Row>& rows, int64_t tile_parts)
      : model_(model),
        num_rows_(rows.size()),
        slot_stride_(model.num_key_heads * model.head_size),
        rows_(rows.data()),
        hidden_(num_rows_ * model.width),
        queries_(num_rows_ * model.num_heads * model.head_size),
        attended_(queries_.size()),
        own_keys_(num_rows_ * slot_stride_),
        own_values_(num_rows_ * slot_stride_),
        gate_(num_rows_ * model.inner_width),
        up_(num_rows_ * model.inner_width),
        normed_(hidden_.size()),
        tile_parts_(tile_parts) {}

  void run() {
    for (int64_t r = 0; r < num_rows_; ++r) {
      A* hidden = &hidden_[r * model_.width];
      if (rows_[r].block) {
        const T* h = model_.state(rows_[r].block - 1, own_slot(r));
        for (int64_t d = 0; d < model_.width; ++d) hidden[d] = static_cast<A>(h[d]);
      } else {
        embed(rows_[r].seat->tokens[position(r)], hidden);
      }
    }
    const int64_t block = rows_[0].block, num_calls = model_.first_calls[block + 1] - model_.first_calls[block];
    for (call_ = 0; call_ < num_calls; ++call_) {
      const LayerCall& call = model_.calls[model_.first_calls[block] + call_];
      const Layer<A>& layer = model_.layers[call.layer];
      norm(hidden_, layer.attention_norm, normed_);
      project_heads(layer);
      cache_heads(layer, call);
      attend();
      add(attended_, layer.o, model_.num_heads * model_.head_size, layer.attention_post_norm);
      norm(hidden_, layer.mlp_norm, normed_);
      feed_forward(layer);
      add(gate_, layer.down, model_.inner_width, layer.mlp_post_norm);
      if (call.is_normed) norm(hidden_, model_.norm, hidden_);
    }
    for (int64_t r = 0; r < num_rows_; ++r) {
      T* h = model_.state(rows_[r].block, own_slot(r));
      for (int64_t d = 0; d < model_.width; ++d) h[d] = static_cast<T>(hidden_[r * model_.width + d]);
    }
  }

 private:
  // Read a token's embedding, rounded to T.
  void embed(int64_t token, A* out) const {
    const int64_t kind = model_.embedding_kind, width = model_.width;
    read_row(kind, model_.embedding + token * row_bytes(kind, width), width, out);
    for (int64_t d = 0; d < width; ++d) out[d] = static_cast<A>(static_cast<T>(out[d]));
  }

  int64_t position(int64_t row) const { return rows_[row].position; }

  int64_t num_keys(int64_t row) const { return position(row) + 1; }

  int64_t slot(int64_t row, int64_t at) const { return rows_[row].seat->slot(at, model_.page_size); }

  int64_t own_slot(int64_t row) const { return slot(row, position(row)); }

  // Where the keys and values of the row's current call begin.
  int64_t offset(int64_t row) const {
    return model_.calls[model_.first_calls[rows_[row].block] + call_].cache * model_.num_slots * slot_stride_;
  }

  template <typename F> void parallel(int64_t count, F&& f) const { ThreadPool::shared().run(model_.num_threads, count, f); }

  void norm(const std::vector<A>& x, const A* weight, std::vector<A>& out) {
    parallel(num_rows_, [&](int64_t begin, int64_t end) {
      for (int64_t at = begin * model_.width; at < end * model_.width; at += model_.width)
        rms_norm(&x[at], weight, model_.width, static_cast<A>(model_.eps), &out[at]);
    });
  }

  // Compute queries, keys and values in one parallel loop over the panels of all three matrices.
  void project_heads(const Layer<A>& layer) {
    const int64_t num_queries = model_.num_heads * model_.head_size;
    const int64_t queries = num_panels<A>(num_queries), keys = num_panels<A>(slot_stride_);
    const Operand<A> normed = rows_for({layer.q, layer.k, layer.v}, normed_, model_.width);
    parallel(queries + 2 * keys, [&](int64_t begin, int64_t end) {
      const auto into = [&](const Matrix& weight, int64_t count, int64_t first, A* y) {
        const int64_t own = std::max(begin - first, int64_t{0}), stop = std::min(end - first, num_panels<A>(count));
        project_into(normed, weight, count, own, stop, y);
      };
      into(layer.q, num_queries, 0, queries_.data());
      into(layer.k, slot_stride_, queries, own_keys_.data());
      into(layer.v, slot_stride_, queries + keys, own_values_.data());
    });
  }

  // Add biases, normalise and rotate the heads. Write keys and values into the cache.
  void cache_heads(const Layer<A>& layer, const LayerCall& call) {
    parallel(num_rows_, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) cache_row(layer, call, r, offset(r) + own_slot(r) * slot_stride_);
    });
  }

  void cache_row(const Layer<A>& layer, const LayerCall& call, int64_t r, int64_t at) {
    const int64_t heads = model_.num_heads, key_heads = model_.num_key_heads, size = model_.head_size;
    for (int64_t head = 0; head < heads; ++head) {
      A* query = &queries_[(r * heads + head) * size];
      finish(query, layer.q_bias, head, layer.q_norm);
      if (call.has_rotary) rotate(query, position(r), query);
    }
    for (int64_t head = 0; head < key_heads; ++head) {
      A *key = &own_keys_[(r * key_heads + head) * size], *value = &own_values_[(r * key_heads + head) * size];
      T* cached = model_.keys + at + head * size;
      finish(key, layer.k_bias, head, layer.k_norm);
      call.has_rotary ? rotate(key, position(r), cached) : copy(key, cached);
      finish(value, layer.v_bias, head, nullptr);
      copy(value, model_.values + at + head * size);
    }
  }

  // Add the head's bias and apply its norm, if the layer has them.
  void finish(A* x, const A* biases, int64_t head, const A* norm) const {
    if (biases)
      for (int64_t p = 0; p < model_.head_size; ++p) x[p] += biases[head * model_.head_size + p];
    if (norm) rms_norm(x, norm, model_.head_size, static_cast<A>(model_.eps), x);
  }

  void copy(const A* x, T* out) const {
    for (int64_t p = 0; p < model_.head_size; ++p) out[p] = static_cast<T>(x[p]);
  }

  template <typename Out> void rotate(const A* x, int64_t position, Out* out) const {
    const A *cos = model_.cos + position * model_.head_size, *sin = model_.sin + position * model_.head_size;
    const int64_t half = model_.head_size / 2;
    for (int64_t p = 0; p < half; ++p) {
      const A first = x[p], second = x[p + half];
      out[p] = static_cast<Out>(first * cos[p] - second * sin[p]);
      out[p + half] = static_cast<Out>(second * cos[p + half] + first * sin[p + half]);
    }
  }

  // Attend in groups of rows of one sequence and block, so that each key and value is read once per group. The fewer rows
  // a group has, the more heads one task processes.
  void attend() {
    std::vector<int64_t> firsts;
    const auto is_other = [&](const Row& a, const Row& b) { return a.seat != b.seat || a.block != b.block; };
    for (int64_t r = 0; r < num_rows_; ++r)
      if (!r || r - firsts.back() == kGroupRows || is_other(rows_[r], rows_[firsts.back()])) firsts.push_back(r);
    firsts.push_back(num_rows_);
    std::fill(attended_.begin(), attended_.end(), A{0});
    const int64_t heads = model_.num_heads;
    parallel((firsts.size() - 1) * heads, [&](int64_t begin, int64_t end) {
      for (int64_t stop; begin < end; begin = stop) {
        const int64_t group = begin / heads, head = begin % heads;
        const Range rows{firsts[group], firsts[group + 1]};
        stop = std::min({end, (group + 1) * heads, begin + kGroupRows / (rows.end - rows.begin)});
        attend_heads(rows, {head, head + stop - begin});
      }
    });
  }

  void attend_heads(Range rows, Range heads) {
    static thread_local std::vector<A> scratch;
    int64_t most = 0;
    for (int64_t r = rows.begin; r < rows.end; ++r) most = std::max(most, num_keys(r));
    const int64_t stride = most + lanes<A>, head_stride = (rows.end - rows.begin) * stride;
    scratch.resize((heads.end - heads.begin) * head_stride);
    const auto each_head = [&](auto&& use) {
      for (int64_t head = heads.begin; head < heads.end; ++head) use(head, &scratch[(head - heads.begin) * head_stride]);
    };
    each_page(rows.begin, most, heads, model_.keys + offset(rows.begin), [&](int64_t key, int64_t count, const T* page) {
      each_head([&](int64_t head, A* weights) {
        score_page(rows, head, page + column(head), count, weights + key, stride);
      });
    });
    each_head([&](int64_t, A* weights) {
      for (int64_t r = rows.begin; r < rows.end; ++r, weights += stride)
        weights[num_keys(r)] = 1 / exponentials(weights, largest(weights, num_keys(r)), num_keys(r));
    });
    each_page(rows.begin, most, heads, model_.values + offset(rows.begin), [&](int64_t key, int64_t count, const T* page) {
      each_head([&](int64_t head, const A* weights) {
        int64_t r = rows.begin;
        for (; r + kTileRows <= rows.end; r += kTileRows, weights += kTileRows * stride)
          add_values<kTileRows>(r, head, page + column(head), key, count, weights, stride);
        for (; r < rows.end; ++r, weights += stride)
          add_values<1>(r, head, page + column(head), key, count, weights, stride);
      });
    });
    each_head([&](int64_t head, const A* weights) {
      for (int64_t r = rows.begin; r < rows.end; ++r, weights += stride)
        for (int64_t p = 0; p < model_.head_size; ++p) attended(r, head)[p] *= weights[num_keys(r)];
    });
  }

  // Call use(key, count, slots) for each page. Pages are loaded into the L2 cache beforehand, because `use` reads head by
  // head, an order that the processor does not prefetch.
  template <typename Use> void each_page(int64_t row, int64_t end, Range heads, const T* cache, Use&& use) const {
    const int64_t first = column(heads.begin), width = column(heads.end - 1) + model_.head_size - first;
    const int64_t page_size = model_.page_size, page_bytes = page_size * width * sizeof(T);
    const int64_t ahead = std::clamp(kReadAheadBytes / page_bytes, int64_t{1}, kPagesAtOnce) * page_size;
    for (int64_t key = 0; key < end; key += page_size) {
      if (key % ahead == 0) load_pages(row, {key, std::min(key + ahead, end)}, cache + first, width);
      use(key, std::min(page_size, end - key), cache + slot(row, key) * slot_stride_);
    }
  }

  // Load the pages of these keys, one line of each in turn. A processor prefetches slowly at the start of a page, but it
  // prefetches several pages at once.
  void load_pages(int64_t row, Range keys, const T* cache, int64_t width) const {
    const int64_t page_size = model_.page_size;
    const T* pages[kPagesAtOnce];
    for (int64_t key = keys.begin, page = 0; key < keys.end; key += page_size)
      pages[page++] = cache + slot(row, key) * slot_stride_;
    for (int64_t i = 0, key = keys.begin; i < page_size && key < keys.end; ++i, ++key) {
      const int64_t num_pages = (keys.end - key + page_size - 1) / page_size;  // that have an i-th key
      for (int64_t p = i * slot_stride_; p < i * slot_stride_ + width; p += 64 / sizeof(T))
        for (int64_t page = 0; page < num_pages; ++page)
          static_cast<void>(*reinterpret_cast<const volatile char*>(pages[page] + p));
    }
  }

  int64_t column(int64_t head) const { return head * model_.num_key_heads / model_.num_heads * model_.head_size; }

  const A* query(int64_t row, int64_t head) const {
    return &queries_[(row * model_.num_heads + head) * model_.head_size];
  }

  A* attended(int64_t row, int64_t head) { return &attended_[(row * model_.num_heads + head) * model_.head_size]; }

  void score_page(Range rows, int64_t head, const T* keys, int64_t count, A* scores, int64_t stride) const {
    const A scale = 1 / std::sqrt(static_cast<A>(model_.head_size));
    for (; count >= lanes<A>; count -= lanes<A>, keys += lanes<A> * slot_stride_, scores += lanes<A>)
      score_keys(rows.begin, rows.end, head, keys, scale, scores, stride);
    for (int64_t key = 0; key < count; ++key)
      for (int64_t r = rows.begin; r < rows.end; ++r)
        scores[(r - rows.begin) * stride + key] = scale * dot(query(r, head), keys + key * slot_stride_, model_.head_size);
  }

  // Compute the attention scores of `lanes` consecutive keys of a page.
  void score_keys(int64_t row, int64_t end, int64_t head, const T* keys, A scale, A* scores, int64_t stride) const {
    const int64_t size = model_.head_size;
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

  // Add the weighted values of `count` keys to the sums of R rows.
  template <int R>
  void add_values(int64_t row, int64_t head, const T* values, int64_t key, int64_t count, const A* weights, int64_t stride) {
    int64_t p = 0;
    for (; p + 4 * lanes<A> <= model_.head_size; p += 4 * lanes<A>)
      add_vectors<R, 4>(row, head, values, key, count, weights, stride, p);
    for (; p + lanes<A> <= model_.head_size; p += lanes<A>)
      add_vectors<R, 1>(row, head, values, key, count, weights, stride, p);
    for (; p < model_.head_size; ++p)
      for (int r = 0; r < R; ++r)
        for (int64_t i = 0; i < std::min(count, num_keys(row + r) - key); ++i)
          attended(row + r, head)[p] += weights[r * stride + key + i] * static_cast<A>(values[i * slot_stride_ + p]);
  }

  // Do the same as `add_values` for N vectors from element p on. First come the keys to which all R rows attend.
  template <int R, int N>
  void add_vectors(
      int64_t row, int64_t head, const T* values, int64_t key, int64_t count, const A* weights, int64_t stride, int64_t p) {
    Vector<A> sums[R][N];
    int64_t shared = count;
    for (int r = 0; r < R; ++r) {
      for (int n = 0; n < N; ++n) sums[r][n] = load(attended(row + r, head) + p + n * lanes<A>);
      shared = std::min(shared, std::max(num_keys(row + r) - key, int64_t{0}));
    }
    for (int64_t i = 0; i < shared; ++i)
      for (int n = 0; n < N; ++n) {
        const Vector<A> value = load(values + i * slot_stride_ + p + n * lanes<A>);
        for (int r = 0; r < R; ++r) sums[r][n] += weights[r * stride + key + i] * value;
      }
    for (int r = 0; r < R; ++r) {
      for (int64_t i = shared; i < std::min(count, num_keys(row + r) - key); ++i)
        for (int n = 0; n < N; ++n)
          sums[r][n] += weights[r * stride + key + i] * load(values + i * slot_stride_ + p + n * lanes<A>);
      for (int n = 0; n < N; ++n) store(sums[r][n], attended(row + r, head) + p + n * lanes<A>);
    }
  }

  void feed_forward(const Layer<A>& layer) {
    const Operand<A> normed = rows_for({layer.gate, layer.up}, normed_, model_.width);
    parallel(num_panels<A>(model_.inner_width), [&](int64_t begin, int64_t end) {
      project_into(normed, layer.gate, model_.inner_width, begin, end, gate_.data());
      project_into(normed, layer.up, model_.inner_width, begin, end, up_.data());
      const int64_t first = begin * panel_rows<A>, last = std::min(end * panel_rows<A>, model_.inner_width);
      for (int64_t r = 0; r < num_rows_; ++r)
        silu_times(&gate_[r * model_.inner_width + first], &up_[r * model_.inner_width + first], last - first);
    });
  }

  // Add the product to the residual, normed if there is a norm.
  void add(const std::vector<A>& x, const Matrix& weight, int64_t length, const A* post_norm) {
    const Operand<A> rows = rows_for({weight}, x, length);
    if (post_norm) std::fill(normed_.begin(), normed_.end(), A{0});
    std::vector<A>& out = post_norm ? normed_ : hidden_;
    parallel(num_panels<A>(model_.width), [&](int64_t begin, int64_t end) {
      project(rows, weight, model_.width, begin, end, [&](int64_t r, int64_t n, const A* products, int64_t count) {
        for (int64_t i = 0; i < count; ++i) out[r * model_.width + n + i] += products[i];
      });
    });
    if (!post_norm) return;
    norm(normed_, post_norm, normed_);
    for (size_t i = 0; i < hidden_.size(); ++i) hidden_[i] += normed_[i];
  }

  Operand<A> rows_for(std::initializer_list<Matrix> weights, const std::vector<A>& x, int64_t length) {
    return operand(model_.num_threads, x.data(), num_rows_, length, weights, tile_parts_, forms_);
  }

  const Model<T> model_;
  const int64_t num_rows_, slot_stride_;
  const Row* rows_;
  std::vector<A> hidden_, queries_, attended_, own_keys_, own_values_, gate_, up_, normed_;
  const int64_t tile_parts_;
  int64_t call_ = 0;  // the current call, counted from each block's first
  Forms forms_;
};

}  // namespace nvium
