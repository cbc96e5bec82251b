// Runs rows of any sequences through one block of a Llama or a related model, with a paged key/value cache. It does the
// same as the layers in nvium_core/model/llama.py, without the overhead of PyTorch's operators. Rows may pass different
// blocks if these call the same layers.
//
// Weights are read once for all rows. Activations inside the block are float32 or better; rounded.h rounds them for
// quantized matrices. Without AMX tiles, a row's results do not depend on the other rows or on the number of
// threads.
//
// Shapes: R rows, H query heads; others as in call.h.
#pragma once

#include <vector>

#include "attention.h"
#include "call.h"

namespace nvium {

// The activations of a pass. They outlive it, because the system would have to clear new memory.
template <typename A> struct Activations {
  std::vector<A> hidden, queries, attended, keys, values, gate, up, normed;
  Forms forms;
};

template <typename T> class BlockForward {
  using A = Accumulator<T>;

 public:
  BlockForward(const Model<T>& model, const std::vector<Row>& rows, int64_t tile_parts)
      : model_(model),
        num_queries_(model.num_heads * model.cache.head_size),
        num_keys_(model.cache.num_heads * model.cache.head_size),
        num_rows_(rows.size()),
        rows_(rows),
        calls_(num_rows_),
        hidden_(sized(kept().hidden, model.width)),
        queries_(sized(kept().queries, num_queries_)),
        attended_(sized(kept().attended, num_queries_)),
        keys_(sized(kept().keys, num_keys_)),
        values_(sized(kept().values, num_keys_)),
        gate_(sized(kept().gate, model.inner_width)),
        up_(sized(kept().up, model.inner_width)),
        normed_(sized(kept().normed, model.width)),
        tile_parts_(tile_parts),
        forms_(kept().forms) {}

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
      project_heads(layer, normed(layer.attention_norm));
      attend(layer, call, call_ + 1 == num_calls);
      if (!num_rows_) return;
      add(attended_, layer.o, num_queries_, layer.attention_post_norm);
      feed_forward(layer, call, normed(layer.mlp_norm));
      add(gate_, layer.down, model_.inner_width, layer.mlp_post_norm);
      if (call.is_normed) norm(hidden_, model_.norm, hidden_);
    }
    for (int64_t r = 0; r < num_rows_; ++r) {
      T* h = model_.state(rows_[r].block, own_slot(r));
      for (int64_t d = 0; d < model_.width; ++d) h[d] = static_cast<T>(hidden_[r * model_.width + d]);
    }
  }

 private:
  static Activations<A>& kept() {
    static thread_local Activations<A> own;
    return own;
  }

  std::vector<A>& sized(std::vector<A>& x, int64_t width) const {
    x.resize(num_rows_ * width);
    return x;
  }

  // Read a token's embedding, rounded to T, and scale it.
  void embed(int64_t token, A* out) const {
    const int64_t kind = model_.embedding_kind, width = model_.width;
    read_row(kind, model_.embedding + token * row_bytes(kind, width), width, out);
    for (int64_t d = 0; d < width; ++d) out[d] = static_cast<A>(static_cast<T>(out[d]));
    if (const A scale = static_cast<A>(model_.embedding_scale); scale != 1)
      for (int64_t d = 0; d < width; ++d) out[d] = static_cast<A>(static_cast<T>(out[d] * scale));
  }

  int64_t position(int64_t row) const { return rows_[row].position; }

  int64_t own_slot(int64_t row) const { return rows_[row].seat->slot(position(row), model_.cache.page_size); }

  template <typename F> void parallel(int64_t count, F&& f) const { ThreadPool::shared().run(model_.num_threads, count, f); }

  void norm(const std::vector<A>& x, const A* weight, std::vector<A>& out) {
    parallel(num_rows_, [&](int64_t begin, int64_t end) {
      for (int64_t at = begin * model_.width; at < end * model_.width; at += model_.width)
        rms_norm(&x[at], weight, model_.width, static_cast<A>(model_.eps), &out[at]);
    });
  }

  // Return the hidden states, normed if there is a norm.
  const std::vector<A>& normed(const A* weight) {
    if (!weight) return hidden_;
    norm(hidden_, weight, normed_);
    return normed_;
  }

  // Compute queries, keys and values in one parallel loop over the panels of all three matrices.
  void project_heads(const Layer<A>& layer, const std::vector<A>& x) {
    const int64_t queries = num_panels<A>(num_queries_), keys = num_panels<A>(num_keys_);
    const Operand<A> rows = rows_for({layer.q, layer.k, layer.v}, x, model_.width);
    parallel(queries + 2 * keys, [&](int64_t begin, int64_t end) {
      const auto into = [&](const Matrix& weight, int64_t count, int64_t first, A* y) {
        const int64_t own = std::max(begin - first, int64_t{0}), stop = std::min(end - first, num_panels<A>(count));
        project_into(rows, weight, count, own, stop, y);
      };
      into(layer.q, num_queries_, 0, queries_.data());
      into(layer.k, num_keys_, queries, keys_.data());
      into(layer.v, num_keys_, queries + keys, values_.data());
    });
  }

  // Finish the heads, write keys and values into the cache, and attend.
  void attend(const Layer<A>& layer, const LayerCall& call, bool is_last) {
    for (int64_t r = 0; r < num_rows_; ++r)
      calls_[r] = model_.calls[model_.first_calls[rows_[r].block] + call_].cache;
    const int64_t threads = model_.num_threads, heads = model_.num_heads;
    const A scale = call.scale ? static_cast<A>(call.scale) : 1 / std::sqrt(static_cast<A>(model_.cache.head_size));
    with_cached<A>(model_.cache, [&]<typename C>(C) {
      Attention<A, C> attention{model_.cache, threads, heads, num_rows_, rows_.data(), calls_.data(), call.window, scale,
                                static_cast<A>(call.cap), queries_.data(), attended_.data()};
      parallel(num_rows_, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
          finish_row(layer, call, r);
          attention.write(r, &keys_[r * num_keys_], &values_[r * num_keys_]);
        }
      });
      if (is_last) drop_unread(), attention.num_rows_ = num_rows_;
      attention.run();
    });
  }

  // Drop the rows whose states are not read: other rows need only their keys and values, which have been written.
  void drop_unread() {
    int64_t kept = 0;
    for (int64_t r = 0; r < num_rows_; ++r) {
      if (!rows_[r].is_read) continue;
      rows_[kept] = rows_[r], calls_[kept] = calls_[r];
      std::copy_n(&hidden_[r * model_.width], model_.width, &hidden_[kept * model_.width]);
      std::copy_n(&queries_[r * num_queries_], num_queries_, &queries_[kept * num_queries_]);
      ++kept;
    }
    num_rows_ = kept;
    hidden_.resize(kept * model_.width);
  }

  // Add biases, normalise and rotate the heads.
  void finish_row(const Layer<A>& layer, const LayerCall& call, int64_t r) {
    const auto add_biases = [](A* x, int64_t length, const A* biases) {
      for (int64_t i = 0; biases && i < length; ++i) x[i] += biases[i];
    };
    const auto finish = [&](A* x, int64_t length, const A* biases, const A* norm) {
      const int64_t size = model_.cache.head_size;
      const auto norm_at = [&](QKNorm place, A* at, int64_t count) {
        if (call.qk_norm == place) rms_norm(at, norm, count, static_cast<A>(model_.eps), at);
      };
      add_biases(x, length, biases);
      norm_at(kWidthNorm, x, length);
      for (A* head = x; head < x + length; head += size) {
        norm_at(kHeadNorm, head, size);
        if (call.rotary >= 0) rotate(head, call.rotary * model_.context + position(r));
        norm_at(kRotatedHeadNorm, head, size);
      }
    };
    finish(&queries_[r * num_queries_], num_queries_, layer.q_bias, layer.q_norm);
    finish(&keys_[r * num_keys_], num_keys_, layer.k_bias, layer.k_norm);
    add_biases(&values_[r * num_keys_], num_keys_, layer.v_bias);
  }

  // Rotate a head by the angles in this row of the tables.
  void rotate(A* x, int64_t row) const {
    const int64_t size = model_.rotary_size, half = size / 2;
    const A *cos = model_.cos + row * size, *sin = model_.sin + row * size;
    for (int64_t p = 0; p < half; ++p) {
      const A first = x[p], second = x[p + half];
      x[p] = first * cos[p] - second * sin[p];
      x[p + half] = second * cos[p + half] + first * sin[p + half];
    }
  }

  void feed_forward(const Layer<A>& layer, const LayerCall& call, const std::vector<A>& x) {
    const Matrix& gate = layer.gate ? layer.gate : layer.up;
    const Operand<A> rows = rows_for({gate, layer.up}, x, model_.width);
    parallel(num_panels<A>(model_.inner_width), [&](int64_t begin, int64_t end) {
      project_into(rows, gate, model_.inner_width, begin, end, gate_.data());
      if (layer.gate) project_into(rows, layer.up, model_.inner_width, begin, end, up_.data());
      const int64_t first = begin * panel_rows<A>, last = std::min(end * panel_rows<A>, model_.inner_width);
      for (int64_t r = 0; r < num_rows_; ++r) {
        const int64_t at = r * model_.inner_width + first;
        activate(call.activation, &gate_[at], layer.gate ? &up_[at] : nullptr, last - first);
      }
    });
  }

  // x = f(x) · y. GELU is approximated with tanh: ½ (1 + tanh(u)) is σ(2u), where u is √(2/π) (x + 0.044715 x³).
  static void activate(int64_t activation, A* x, const A* y, int64_t length) {
    if (activation == kSilu) return silu_times(x, y, length);
    if (activation == kGeluTanh)
      return sigmoid_times(x, y, length, [](auto value) {
        return value * (value * value * A(0.044715 * 1.5957691216057308) + A(1.5957691216057308));
      });
    for (int64_t i = 0; i < length; ++i) x[i] = std::max(x[i], A(0)) * std::max(x[i], A(0)) * (y ? y[i] : 1);  // ReLU²
  }

  // Add the product to the residual, normed if there is a norm, and scaled.
  void add(const std::vector<A>& x, const Matrix& weight, int64_t length, const A* post_norm) {
    const Operand<A> rows = rows_for({weight}, x, length);
    if (post_norm) std::fill(normed_.begin(), normed_.end(), A{0});
    std::vector<A>& out = post_norm ? normed_ : hidden_;
    const A scale = static_cast<A>(model_.residual_scale), factor = post_norm ? 1 : scale;
    parallel(num_panels<A>(model_.width), [&](int64_t begin, int64_t end) {
      project(rows, weight, model_.width, begin, end, [&](int64_t r, int64_t n, const A* products, int64_t count) {
        for (int64_t i = 0; i < count; ++i) out[r * model_.width + n + i] += factor * products[i];
      });
    });
    if (!post_norm) return;
    norm(normed_, post_norm, normed_);
    for (size_t i = 0; i < hidden_.size(); ++i) hidden_[i] += scale * normed_[i];
  }

  Operand<A> rows_for(std::initializer_list<Matrix> weights, const std::vector<A>& x, int64_t length) {
    return operand(model_.num_threads, x.data(), num_rows_, length, weights, tile_parts_, forms_);
  }

  const Model<T> model_;
  const int64_t num_queries_, num_keys_;
  int64_t num_rows_;
  std::vector<Row> rows_;
  std::vector<int64_t> calls_;
  std::vector<A>&hidden_, &queries_, &attended_, &keys_, &values_, &gate_, &up_, &normed_;
  const int64_t tile_parts_;
  Forms& forms_;
  int64_t call_ = 0;  // the current call, counted from each block's first
};

}  // namespace nvium
