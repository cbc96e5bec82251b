// A block of a Llama or of its relatives, for a few rows of any sequences over a paged key/value cache, in one call: what
// the plain PyTorch layers of nvium_core/model/llama.py compute, without an operator's overhead for each of their parts.
//
// Weights are read once for all rows of the call, as they are stored; sums and whatever lies between two layers are float32
// or better. A row's results depend neither on the other rows nor on the number of threads.
//
// Shapes: R rows, D width, H query heads, G key heads, P head size, M inner width, S cache slots, L layers, N blocks.

#pragma once

#include <vector>

#include "draw.h"
#include "matrix.h"
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

// A running sequence: its pages, and what its draws depend on.
struct Seat {
  const int64_t* pages;
  int64_t seed, choice;
  Manner manner;
};

// places [R, 2]: each row's position and seat. tokens [R]: null but for the first block.
struct Rows {
  int64_t count;
  const int64_t* places;
  const Seat* seats;
  const int64_t* tokens;
};

template <typename T> class Pass {
  using A = Accumulator<T>;

 public:
  Pass(const BlockShape& shape, const Tensors<T>& tensors, const Rows& rows)
      : shape_(shape),
        num_rows_(rows.count),
        slot_stride_(shape.num_key_heads * shape.head_size),
        keys_(tensors.keys),
        values_(tensors.values),
        places_(rows.places),
        seats_(rows.seats),
        cos_(tensors.cos),
        sin_(tensors.sin),
        states_(tensors.states),
        hidden_(num_rows_ * shape.width),
        queries_(num_rows_ * shape.num_heads * shape.head_size),
        attended_(queries_.size()),
        own_keys_(num_rows_ * slot_stride_),
        own_values_(num_rows_ * slot_stride_),
        gate_(num_rows_ * shape.inner),
        up_(num_rows_ * shape.inner),
        normed_(hidden_.size()) {
    for (int64_t r = 0; r < num_rows_; ++r) {
      const T* h = rows.tokens ? tensors.embedding + rows.tokens[r] * shape.width : state(r, shape.boundary);
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

  int64_t position(int64_t row) const { return places_[2 * row]; }

  const Seat& seat(int64_t row) const { return seats_[places_[2 * row + 1]]; }

  int64_t own_slot(int64_t row) const { return slot(row, position(row)); }

  // Leave the rows at the next boundary.
  void keep() const {
    for (int64_t r = 0; r < num_rows_; ++r) {
      T* h = state(r, shape_.boundary + 1);
      for (int64_t d = 0; d < shape_.width; ++d) h[d] = static_cast<T>(hidden_[r * shape_.width + d]);
    }
  }

 private:
  // Where a row's sequence keeps a position, in slots.
  int64_t slot(int64_t row, int64_t at) const {
    return seat(row).pages[at / shape_.page_size] * shape_.page_size + at % shape_.page_size;
  }

  T* state(int64_t row, int64_t boundary) const {
    return states_ + ((boundary - 1) * shape_.num_slots + own_slot(row)) * shape_.width;
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
    share_out(queries + 2 * keys, [&](int64_t begin, int64_t end) {
      const auto into = [&](const Matrix& weight, int64_t count, int64_t first, A* y) {
        const int64_t own = std::max(begin - first, int64_t{0}), stop = std::min(end - first, num_panels<A>(count));
        project_into(normed_.data(), weight, num_rows_, shape_.width, count, own, stop, y);
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
      T* kept = keys_ + at + head * size;
      finish(key, layer.k_bias, head, layer.k_norm);
      layer.has_rotary ? rotate(key, position(r), kept) : copy(key, kept);
      finish(value, layer.v_bias, head, nullptr);
      copy(value, values_ + at + head * size);
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
    const A *cos = cos_ + position * shape_.head_size, *sin = sin_ + position * shape_.head_size;
    const int64_t half = shape_.head_size / 2;
    for (int64_t p = 0; p < half; ++p) {
      const A first = x[p], second = x[p + half];
      out[p] = static_cast<Out>(first * cos[p] - second * sin[p]);
      out[p + half] = static_cast<Out>(second * cos[p + half] + first * sin[p + half]);
    }
  }

  void attend(int64_t offset) {
    share_out(num_rows_ * shape_.num_heads, [&](int64_t begin, int64_t end) {
      static thread_local std::vector<A> scratch;
      scratch.resize(most_keys_ + lanes<A>);
      for (int64_t part = begin; part < end; ++part) attend_head(part, offset, scratch);
    });
  }

  void attend_head(int64_t part, int64_t offset, std::vector<A>& scratch) {
    const int64_t row = part / shape_.num_heads, head = part % shape_.num_heads;
    const int64_t head_offset = offset + head * shape_.num_key_heads / shape_.num_heads * shape_.head_size;
    const A share = weigh(row, &queries_[part * shape_.head_size], keys_ + head_offset, scratch.data());
    A* out = &attended_[part * shape_.head_size];
    int64_t p = 0;
    for (; p + 4 * lanes<A> <= shape_.head_size; p += 4 * lanes<A>)
      sum_values<4>(row, values_ + head_offset + p, scratch.data(), share, out + p);
    for (; p + lanes<A> <= shape_.head_size; p += lanes<A>)
      sum_values<1>(row, values_ + head_offset + p, scratch.data(), share, out + p);
    for (; p < shape_.head_size; ++p) {
      A sum = 0;
      each_key(row, [&](int64_t key, int64_t slot) {
        sum += scratch[key] * static_cast<A>(values_[head_offset + slot * slot_stride_ + p]);
      });
      out[p] = sum * share;
    }
  }

  // e^(score) of each key a row sees, up to a common factor; returns one over their sum.
  A weigh(int64_t row, const A* query, const T* keys, A* weights) const {
    const int64_t num_keys = position(row) + 1;
    const A scale = 1 / std::sqrt(static_cast<A>(shape_.head_size));
    for (int64_t first = 0; first < num_keys; first += shape_.page_size) {
      const T* page = keys + slot(row, first) * slot_stride_;
      int64_t key = 0;
      for (; key + lanes<A> <= shape_.page_size && first + key < num_keys; key += lanes<A>)
        store(scale * products(query, page + key * slot_stride_, slot_stride_, shape_.head_size), weights + first + key);
      for (; key < std::min(shape_.page_size, num_keys - first); ++key)
        weights[first + key] = scale * dot(query, page + key * slot_stride_, shape_.head_size);
    }
    return 1 / exponentials(weights, *std::max_element(weights, weights + num_keys), num_keys);
  }

  template <int N> void sum_values(int64_t row, const T* values, const A* weights, A share, A* out) const {
    Vector<A> sums[N]{};
    each_key(row, [&](int64_t key, int64_t slot) {
      for (int n = 0; n < N; ++n) sums[n] += weights[key] * load(values + slot * slot_stride_ + n * lanes<A>);
    });
    for (int n = 0; n < N; ++n) store(share * sums[n], out + n * lanes<A>);
  }

  template <typename Use> void each_key(int64_t row, Use&& use) const {
    const int64_t num_keys = position(row) + 1;
    for (int64_t first = 0; first < num_keys; first += shape_.page_size) {
      const int64_t first_slot = slot(row, first);
      for (int64_t key = first; key < std::min(first + shape_.page_size, num_keys); ++key)
        use(key, first_slot + key - first);
    }
  }

  void feed_forward(const Layer<A>& layer) {
    share_out(num_panels<A>(shape_.inner), [&](int64_t begin, int64_t end) {
      project_into(normed_.data(), layer.gate, num_rows_, shape_.width, shape_.inner, begin, end, gate_.data());
      project_into(normed_.data(), layer.up, num_rows_, shape_.width, shape_.inner, begin, end, up_.data());
      const int64_t first = begin * panel_rows<A>, last = std::min(end * panel_rows<A>, shape_.inner);
      for (int64_t r = 0; r < num_rows_; ++r)
        silu_times(&gate_[r * shape_.inner + first], &up_[r * shape_.inner + first], last - first);
    });
  }

  void add(const std::vector<A>& x, const Matrix& weight, int64_t length) {
    share_out(num_panels<A>(shape_.width), [&](int64_t begin, int64_t end) {
      project(x.data(), weight, num_rows_, length, shape_.width, begin, end,
              [&](int64_t r, int64_t n, const A* products, int64_t count) {
                for (int64_t i = 0; i < count; ++i) hidden_[r * shape_.width + n + i] += products[i];
              });
    });
  }

  const BlockShape shape_;
  const int64_t num_rows_, slot_stride_;
  T *keys_, *values_;
  const int64_t* places_;
  const Seat* seats_;
  const A *cos_, *sin_;
  T* states_;
  std::vector<A> hidden_, queries_, attended_, own_keys_, own_values_, gate_, up_, normed_;
  int64_t most_keys_ = 0;
  int num_threads_ = 1;
};

}  // namespace nvium
