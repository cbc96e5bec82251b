// A block of a Llama or of its relatives, for a few rows of any sequences over a paged key/value cache, in one call: what
// the plain PyTorch layers of nvium_core/model/llama.py compute, without an operator's overhead for each of their parts.
//
// Weights are read once for all rows of the call, as they are stored; sums and whatever lies between two layers are float32
// or better. A row's results depend neither on the other rows nor on the number of threads.
//
// Shapes: R rows, D width, H query heads, G key heads, P head size, M inner width, S cache slots, L layers, N blocks.

#pragma once

#include <vector>

#include "matrix.h"
#include "seat.h"
#include "team.h"

namespace nvium {

// In the order of the caller's list. Biases [H * P] or [G * P] and norms [P] of heads are null where a layer has none.
template <typename A> struct Layer {
  const A* attention_norm;
  Matrix q, k, v, o;
  const A *q_bias, *k_bias, *v_bias, *q_norm, *k_norm;
  int64_t has_rotary;
  const A* mlp_norm;
  Matrix gate, up, down;
};

struct BlockShape {
  int64_t boundary, num_layers, first_layer, width, inner, num_heads, num_key_heads, head_size, page_size, num_slots;
  double eps;
};

// keys, values [L, S, G, P]; cos, sin [context, P]; states [N, S, D], behind each block; embedding [V, D].
template <typename T> struct Tensors {
  T *keys, *values;
  const Accumulator<T> *cos, *sin;
  T* states;
  const T* embedding;
};

// A row of a sequence.
struct Row {
  int64_t position;
  const Seat* seat;
};

constexpr int64_t kTogether = 32;                       // rows that attend together at most
constexpr int kTileRows = kRegisters == 32 ? 4 : 2;  // rows whose sums over keys fit in registers

template <typename T> class BlockForward {
  using A = Accumulator<T>;

 public:
  BlockForward(const BlockShape& shape, const Tensors<T>& tensors, const std::vector<Row>& rows, bool is_tiled)
      : shape_(shape),
        num_rows_(rows.size()),
        slot_stride_(shape.num_key_heads * shape.head_size),
        rows_(rows.data()),
        tensors_(tensors),
        hidden_(num_rows_ * shape.width),
        queries_(num_rows_ * shape.num_heads * shape.head_size),
        attended_(queries_.size()),
        own_keys_(num_rows_ * slot_stride_),
        own_values_(num_rows_ * slot_stride_),
        gate_(num_rows_ * shape.inner),
        up_(num_rows_ * shape.inner),
        normed_(hidden_.size()),
        is_tiled_(is_tiled) {
    for (int64_t r = 0; r < num_rows_; ++r) {
      const T* h = shape.boundary ? state(r, shape.boundary)
                                  : tensors.embedding + rows[r].seat->tokens[position(r)] * shape.width;
      for (int64_t d = 0; d < shape.width; ++d) hidden_[r * shape.width + d] = static_cast<A>(h[d]);
      most_keys_ = std::max(most_keys_, position(r) + 1);
    }
  }

  void run(const Layer<A>* layers, int num_threads) {
    num_threads_ = num_threads;
    for (int64_t i = 0; i < shape_.num_layers; ++i) {
      const Layer<A>& layer = layers[i];
      const int64_t offset = (shape_.first_layer + i) * shape_.num_slots * slot_stride_;
      norm(layer.attention_norm);
      project_heads(layer);
      place_heads(layer, offset);
      attend(offset);
      add(attended_, layer.o, shape_.num_heads * shape_.head_size);
      norm(layer.mlp_norm);
      feed_forward(layer);
      add(gate_, layer.down, shape_.inner);
    }
  }

  int64_t position(int64_t row) const { return rows_[row].position; }

  int64_t own_slot(int64_t row) const { return slot(row, position(row)); }

  // Leave the rows at the next boundary.
  void keep() const {
    for (int64_t r = 0; r < num_rows_; ++r) {
      T* h = state(r, shape_.boundary + 1);
      for (int64_t d = 0; d < shape_.width; ++d) h[d] = static_cast<T>(hidden_[r * shape_.width + d]);
    }
  }

 private:
  int64_t slot(int64_t row, int64_t at) const { return rows_[row].seat->slot(at, shape_.page_size); }

  T* state(int64_t row, int64_t boundary) const {
    return tensors_.states + ((boundary - 1) * shape_.num_slots + own_slot(row)) * shape_.width;
  }

  template <typename F> void share_out(int64_t count, F&& f) const { Team::shared().run(num_threads_, count, f); }

  void norm(const A* weight) {
    share_out(num_rows_, [&](int64_t begin, int64_t end) {
      for (int64_t at = begin * shape_.width; at < end * shape_.width; at += shape_.width)
        rms_norm(&hidden_[at], weight, shape_.width, static_cast<A>(shape_.eps), &normed_[at]);
    });
  }

  // Queries, and the rows' own keys and values: the panels of all three, one after another.
  void project_heads(const Layer<A>& layer) {
    const int64_t of_queries = shape_.num_heads * shape_.head_size;
    const int64_t queries = num_panels<A>(of_queries), keys = num_panels<A>(slot_stride_);
    const Operand<A> normed = operand(normed_, shape_.width);
    share_out(queries + 2 * keys, [&](int64_t begin, int64_t end) {
      const auto into = [&](const Matrix& weight, int64_t count, int64_t first, A* y) {
        const int64_t own = std::max(begin - first, int64_t{0}), stop = std::min(end - first, num_panels<A>(count));
        project_into(normed, weight, count, own, stop, y);
      };
      into(layer.q, of_queries, 0, queries_.data());
      into(layer.k, slot_stride_, queries, own_keys_.data());
      into(layer.v, slot_stride_, queries + keys, own_values_.data());
    });
  }

  // Queries where they are, keys and values into the cache.
  void place_heads(const Layer<A>& layer, int64_t offset) {
    share_out(num_rows_, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) place_row(layer, r, offset + own_slot(r) * slot_stride_);
    });
  }

  void place_row(const Layer<A>& layer, int64_t r, int64_t at) {
    const int64_t heads = shape_.num_heads, key_heads = shape_.num_key_heads, size = shape_.head_size;
    for (int64_t head = 0; head < heads; ++head) {
      A* query = &queries_[(r * heads + head) * size];
      finish(query, layer.q_bias, head, layer.q_norm);
      if (layer.has_rotary) rotate(query, position(r), query);
    }
    for (int64_t head = 0; head < key_heads; ++head) {
      A *key = &own_keys_[(r * key_heads + head) * size], *value = &own_values_[(r * key_heads + head) * size];
      T* kept = tensors_.keys + at + head * size;
      finish(key, layer.k_bias, head, layer.k_norm);
      layer.has_rotary ? rotate(key, position(r), kept) : copy(key, kept);
      finish(value, layer.v_bias, head, nullptr);
      copy(value, tensors_.values + at + head * size);
    }
  }

  // A head's bias, if there are biases, and its norm.
  void finish(A* x, const A* biases, int64_t head, const A* norm) const {
    if (biases)
      for (int64_t p = 0; p < shape_.head_size; ++p) x[p] += biases[head * shape_.head_size + p];
    if (norm) rms_norm(x, norm, shape_.head_size, static_cast<A>(shape_.eps), x);
  }

  void copy(const A* x, T* out) const {
    for (int64_t p = 0; p < shape_.head_size; ++p) out[p] = static_cast<T>(x[p]);
  }

  template <typename Out> void rotate(const A* x, int64_t position, Out* out) const {
    const A *cos = tensors_.cos + position * shape_.head_size, *sin = tensors_.sin + position * shape_.head_size;
    const int64_t half = shape_.head_size / 2;
    for (int64_t p = 0; p < half; ++p) {
      const A first = x[p], second = x[p + half];
      out[p] = static_cast<Out>(first * cos[p] - second * sin[p]);
      out[p + half] = static_cast<Out>(second * cos[p + half] + first * sin[p + half]);
    }
  }

  // Rows of one sequence attend together: each key and value is read once for up to kTogether of them.
  void attend(int64_t offset) {
    std::vector<int64_t> firsts;
    for (int64_t r = 0; r < num_rows_; ++r)
      if (!r || r - firsts.back() == kTogether || !are_of_one_sequence(r, firsts.back())) firsts.push_back(r);
    firsts.push_back(num_rows_);
    share_out((firsts.size() - 1) * shape_.num_heads, [&](int64_t begin, int64_t end) {
      for (int64_t part = begin; part < end; ++part) {
        const int64_t group = part / shape_.num_heads;
        attend_head(firsts[group], firsts[group + 1], part % shape_.num_heads, offset);
      }
    });
  }

  bool are_of_one_sequence(int64_t row, int64_t other) const { return rows_[row].seat == rows_[other].seat; }

  void attend_head(int64_t row, int64_t end, int64_t head, int64_t offset) {
    static thread_local std::vector<A> scratch;
    const int64_t head_offset = offset + head * shape_.num_key_heads / shape_.num_heads * shape_.head_size;
    const int64_t apart = most_keys_ + lanes<A>;
    scratch.resize((end - row) * apart);
    weigh(row, end, head, tensors_.keys + head_offset, scratch.data(), apart);
    const A* weights = scratch.data();
    for (; row + kTileRows <= end; row += kTileRows, weights += kTileRows * apart)
      sum_all_values<kTileRows>(row, head, tensors_.values + head_offset, weights, apart);
    for (; row < end; ++row, weights += apart) sum_all_values<1>(row, head, tensors_.values + head_offset, weights, apart);
  }

  int64_t num_keys(int64_t row) const { return position(row) + 1; }

  const A* query(int64_t row, int64_t head) const {
    return &queries_[(row * shape_.num_heads + head) * shape_.head_size];
  }

  // For rows [row, end): e^(score) of each key a row sees, over their sum.
  void weigh(int64_t row, int64_t end, int64_t head, const T* keys, A* weights, int64_t apart) const {
    const A scale = 1 / std::sqrt(static_cast<A>(shape_.head_size));
    const int64_t page_size = shape_.page_size, size = shape_.head_size;
    int64_t most = 0;
    for (int64_t r = row; r < end; ++r) most = std::max(most, num_keys(r));
    for (int64_t first = 0; first < most; first += page_size) {
      const T* page = keys + slot(row, first) * slot_stride_;
      int64_t key = 0;
      for (; key + lanes<A> <= page_size && first + key < most; key += lanes<A>)
        score_keys(row, end, head, page + key * slot_stride_, scale, weights + first + key, apart);
      for (; key < std::min(page_size, most - first); ++key)
        for (int64_t r = row; r < end; ++r)
          weights[(r - row) * apart + first + key] = scale * dot(query(r, head), page + key * slot_stride_, size);
    }
    for (int64_t r = row; r < end; ++r, weights += apart) {
      const A share = 1 / exponentials(weights, largest(weights, num_keys(r)), num_keys(r));
      weights[num_keys(r)] = share;
    }
  }

  // Of as many keys as a vector has lanes.
  void score_keys(int64_t row, int64_t end, int64_t head, const T* keys, A scale, A* scores, int64_t apart) const {
    const int64_t size = shape_.head_size;
    if (end - row >= kTileRows) {
      static thread_local std::vector<A> tile;
      tile.resize(size * lanes<A>);
      transpose(keys, slot_stride_, size, tile.data());
      for (; row + kTileRows <= end; row += kTileRows, scores += kTileRows * apart) {
        const A* queries[kTileRows];
        Vector<A> sums[kTileRows];
        for (int r = 0; r < kTileRows; ++r) queries[r] = query(row + r, head);
        products_of_tile(queries, tile.data(), size, sums);
        for (int r = 0; r < kTileRows; ++r) store(scale * sums[r], scores + r * apart);
      }
    }
    for (; row < end; ++row, scores += apart)
      store(scale * products(query(row, head), keys, slot_stride_, size), scores);
  }

  template <int R> void sum_all_values(int64_t row, int64_t head, const T* values, const A* weights, int64_t apart) {
    int64_t p = 0;
    for (; p + 4 * lanes<A> <= shape_.head_size; p += 4 * lanes<A>) sum_values<R, 4>(row, head, values, weights, apart, p);
    for (; p + lanes<A> <= shape_.head_size; p += lanes<A>) sum_values<R, 1>(row, head, values, weights, apart, p);
    for (; p < shape_.head_size; ++p)
      for (int r = 0; r < R; ++r) {
        const A* own = weights + r * apart;
        A sum = 0;
        each_key(row + r, 0, num_keys(row + r), values, [&](int64_t key, const T* slots) {
          sum += own[key] * static_cast<A>(slots[p]);
        });
        attended(row + r, head)[p] = sum * own[num_keys(row + r)];
      }
  }

  A* attended(int64_t row, int64_t head) { return &attended_[(row * shape_.num_heads + head) * shape_.head_size]; }

  // N vectors from p on of each row's sum, first over the keys that all R rows see.
  template <int R, int N>
  void sum_values(int64_t row, int64_t head, const T* values, const A* weights, int64_t apart, int64_t p) {
    Vector<A> sums[R][N]{};
    int64_t shared = num_keys(row);
    for (int r = 1; r < R; ++r) shared = std::min(shared, num_keys(row + r));
    each_key(row, 0, shared, values, [&](int64_t key, const T* at) {
      for (int n = 0; n < N; ++n) {
        const Vector<A> value = load(at + p + n * lanes<A>);
        for (int r = 0; r < R; ++r) sums[r][n] += weights[r * apart + key] * value;
      }
    });
    for (int r = 0; r < R; ++r) {
      const A* own = weights + r * apart;
      each_key(row + r, shared, num_keys(row + r), values, [&](int64_t key, const T* at) {
        for (int n = 0; n < N; ++n) sums[r][n] += own[key] * load(at + p + n * lanes<A>);
      });
      for (int n = 0; n < N; ++n) store(own[num_keys(row + r)] * sums[r][n], attended(row + r, head) + p + n * lanes<A>);
    }
  }

  template <typename Use> void each_key(int64_t row, int64_t key, int64_t end, const T* values, Use&& use) const {
    while (key < end) {
      const int64_t stop = std::min(end, key / shape_.page_size * shape_.page_size + shape_.page_size);
      for (const T* at = values + slot(row, key) * slot_stride_; key < stop; ++key, at += slot_stride_) use(key, at);
    }
  }

  void feed_forward(const Layer<A>& layer) {
    const Operand<A> normed = operand(normed_, shape_.width);
    share_out(num_panels<A>(shape_.inner), [&](int64_t begin, int64_t end) {
      project_into(normed, layer.gate, shape_.inner, begin, end, gate_.data());
      project_into(normed, layer.up, shape_.inner, begin, end, up_.data());
      const int64_t first = begin * panel_rows<A>, last = std::min(end * panel_rows<A>, shape_.inner);
      for (int64_t r = 0; r < num_rows_; ++r)
        silu_times(&gate_[r * shape_.inner + first], &up_[r * shape_.inner + first], last - first);
    });
  }

  void add(const std::vector<A>& x, const Matrix& weight, int64_t length) {
    const Operand<A> rows = operand(x, length);
    share_out(num_panels<A>(shape_.width), [&](int64_t begin, int64_t end) {
      project(rows, weight, shape_.width, begin, end, [&](int64_t r, int64_t n, const A* products, int64_t count) {
        for (int64_t i = 0; i < count; ++i) hidden_[r * shape_.width + n + i] += products[i];
      });
    });
  }

  // These rows, in tiles where they are used.
  Operand<A> operand(const std::vector<A>& x, int64_t length) {
    Operand<A> out{x.data(), num_rows_, length};
    if constexpr (kMayTile<A>)
      if (is_tiled_ && length % kTileDepth == 0) {
        out.tiled = &tiled_.resized(num_rows_, length);
        share_out(num_rows_, [&](int64_t begin, int64_t end) { split_rows(x.data(), length, begin, end, tiled_); });
      }
    return out;
  }

  const BlockShape shape_;
  const int64_t num_rows_, slot_stride_;
  const Row* rows_;
  const Tensors<T>& tensors_;
  std::vector<A> hidden_, queries_, attended_, own_keys_, own_values_, gate_, up_, normed_;
  const bool is_tiled_;
  TiledRows tiled_;
  int64_t most_keys_ = 0;
  int num_threads_ = 1;
};

}  // namespace nvium
