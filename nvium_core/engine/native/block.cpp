// A block of a Llama, for a few rows of any sequences over a paged key/value cache, in one call: what the plain PyTorch
// layers of nvium_core/model/llama.py compute, without an operator's overhead for each of their parts.
//
// Weights are read once for all rows of the call, in the precision they are stored in; sums and whatever lies between
// two layers are float32 or better. A row's results depend neither on the other rows nor on the number of threads.
//
// Shapes: R rows, D width, H query heads, G key heads, P head size, M inner width, S cache slots, L layers.

#include <omp.h>

#include <vector>

#include "projection.h"

namespace nvium {
namespace {

// In the order of the caller's list.
template <typename T> struct Layer {
  const T *attention_norm, *q, *k, *v, *o, *mlp_norm, *gate, *up, *down;
};

struct Shape {
  int64_t boundary, num_layers, first_layer, width, inner, num_heads, num_key_heads, head_size, page_size, num_slots;
  double eps;
};

// keys, values [L, S, G, P]; cos, sin [context, P]; states [2, S, D], boundaries taking turns; embedding [V, D].
template <typename T> struct Tensors {
  T *keys, *values;
  const Accumulator<T> *cos, *sin;
  T* states;
  const T* embedding;
};

// places [R, 2]: each row's position, and where in `pages` those of its sequence begin. tokens [R]: null but for the
// first block.
struct Rows {
  int64_t count;
  const int64_t *places, *pages, *tokens;
};

template <typename T> class Pass {
  using A = Accumulator<T>;

 public:
  Pass(const Shape& shape, const Tensors<T>& tensors, const Rows& rows)
      : shape_(shape),
        num_rows_(rows.count),
        slot_stride_(shape.num_key_heads * shape.head_size),
        keys_(tensors.keys),
        values_(tensors.values),
        places_(rows.places),
        pages_(rows.pages),
        cos_(tensors.cos),
        sin_(tensors.sin),
        states_(tensors.states),
        hidden_(num_rows_ * shape.width),
        queries_(num_rows_ * shape.num_heads * shape.head_size),
        attended_(queries_.size()),
        gate_(num_rows_ * shape.inner),
        up_(num_rows_ * shape.inner) {
    for (int64_t r = 0; r < num_rows_; ++r) {
      const T* h = rows.tokens ? tensors.embedding + rows.tokens[r] * shape.width : state(r, shape.boundary);
      for (int64_t d = 0; d < shape.width; ++d) hidden_[r * shape.width + d] = static_cast<A>(h[d]);
      most_keys_ = std::max(most_keys_, position(r) + 1);
    }
  }

  void run(const Layer<T>* layers, int num_threads) {
#pragma omp parallel num_threads(num_threads)
    {
      const int number = omp_get_thread_num(), of = omp_get_num_threads();
      std::vector<A> normed(hidden_.size()), scratch(std::max(most_keys_ + lanes<A>, num_rows_ * shape_.head_size));
      for (int64_t i = 0; i < shape_.num_layers; ++i) {
        const Layer<T>& layer = layers[i];
        const int64_t offset = (shape_.first_layer + i) * shape_.num_slots * slot_stride_;
        norm(layer.attention_norm, normed);
        project_heads(layer, offset, normed, scratch, number, of);
#pragma omp barrier
        attend(offset, scratch, number, of);
#pragma omp barrier
        add(attended_, layer.o, shape_.num_heads * shape_.head_size, number, of);
#pragma omp barrier
        norm(layer.mlp_norm, normed);
        feed_forward(layer, normed, number, of);
#pragma omp barrier
        add(gate_, layer.down, shape_.inner, number, of);
#pragma omp barrier
      }
    }
  }

  // Leave the rows at the next boundary.
  void keep() const {
    for (int64_t r = 0; r < num_rows_; ++r) {
      T* h = state(r, shape_.boundary + 1);
      for (int64_t d = 0; d < shape_.width; ++d) h[d] = static_cast<T>(hidden_[r * shape_.width + d]);
    }
  }

 private:
  int64_t position(int64_t row) const { return places_[2 * row]; }

  // Where a row's sequence keeps a position, in slots.
  int64_t slot(int64_t row, int64_t at) const {
    return pages_[places_[2 * row + 1] + at / shape_.page_size] * shape_.page_size + at % shape_.page_size;
  }

  T* state(int64_t row, int64_t boundary) const {
    return states_ + (boundary % 2 * shape_.num_slots + slot(row, position(row))) * shape_.width;
  }

  void norm(const T* weight, std::vector<A>& normed) const {
    for (int64_t r = 0; r < num_rows_; ++r)
      rms_norm(&hidden_[r * shape_.width], weight, shape_.width, static_cast<A>(shape_.eps), &normed[r * shape_.width]);
  }

  // Queries into a buffer, keys and values into the cache, a head at a time.
  void project_heads(const Layer<T>& layer, int64_t offset, const std::vector<A>& normed, std::vector<A>& scratch,
                     int number, int of) {
    const Part heads(shape_.num_heads + 2 * shape_.num_key_heads, 1, number, of);
    for (int64_t head = heads.begin; head < heads.end; ++head) {
      const int64_t of_keys = head - shape_.num_heads, of_values = of_keys - shape_.num_key_heads;
      const T* weight = of_keys < 0 ? layer.q + head * shape_.head_size * shape_.width
                        : of_values < 0 ? layer.k + of_keys * shape_.head_size * shape_.width
                                        : layer.v + of_values * shape_.head_size * shape_.width;
      A* out = scratch.data();
      project(normed.data(), weight, num_rows_, shape_.width, Part(shape_.head_size, lanes<A>, 0, 1),
              [&](int64_t r, int64_t n, A product) { out[r * shape_.head_size + n] = product; });
      for (int64_t r = 0; r < num_rows_; ++r) {
        const A* x = out + r * shape_.head_size;
        if (of_keys < 0)
          rotate(x, position(r), &queries_[(r * shape_.num_heads + head) * shape_.head_size]);
        else if (of_values < 0)
          rotate(x, position(r), keys_ + offset + slot(r, position(r)) * slot_stride_ + of_keys * shape_.head_size);
        else
          copy(x, values_ + offset + slot(r, position(r)) * slot_stride_ + of_values * shape_.head_size);
      }
    }
  }

  void copy(const A* x, T* out) const {
    for (int64_t p = 0; p < shape_.head_size; ++p) out[p] = static_cast<T>(x[p]);
  }

  template <typename Out> void rotate(const A* x, int64_t position, Out* out) const {
    const A *cos = cos_ + position * shape_.head_size, *sin = sin_ + position * shape_.head_size;
    const int64_t half = shape_.head_size / 2;
    for (int64_t p = 0; p < half; ++p) {
      out[p] = static_cast<Out>(x[p] * cos[p] - x[p + half] * sin[p]);
      out[p + half] = static_cast<Out>(x[p + half] * cos[p + half] + x[p] * sin[p + half]);
    }
  }

  void attend(int64_t offset, std::vector<A>& scratch, int number, int of) {
    const Part parts(num_rows_ * shape_.num_heads, 1, number, of);
    for (int64_t part = parts.begin; part < parts.end; ++part) {
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
  }

  // e^(score) of each key a row sees, up to a common factor; returns one over their sum.
  A weigh(int64_t row, const A* query, const T* keys, A* weights) const {
    const int64_t num_keys = position(row) + 1;
    const A scale = 1 / std::sqrt(static_cast<A>(shape_.head_size));
    for (int64_t first = 0; first < num_keys; first += shape_.page_size) {
      const T* page = keys + slot(row, first) * slot_stride_;
      int64_t key = 0;
      for (; key + lanes<A> <= shape_.page_size && first + key < num_keys; key += lanes<A>)
        store(scale * products<1>(query, page + key * slot_stride_, slot_stride_, shape_.head_size), weights + first + key);
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

  void feed_forward(const Layer<T>& layer, const std::vector<A>& normed, int number, int of) {
    const Part part(shape_.inner, lanes<A>, number, of);
    project(normed.data(), layer.gate, num_rows_, shape_.width, part,
            [&](int64_t r, int64_t n, A product) { gate_[r * shape_.inner + n] = product; });
    project(normed.data(), layer.up, num_rows_, shape_.width, part,
            [&](int64_t r, int64_t n, A product) { up_[r * shape_.inner + n] = product; });
    for (int64_t r = 0; r < num_rows_; ++r)
      silu_times(&gate_[r * shape_.inner + part.begin], &up_[r * shape_.inner + part.begin], part.end - part.begin);
  }

  void add(const std::vector<A>& x, const T* weight, int64_t length, int number, int of) {
    project(x.data(), weight, num_rows_, length, Part(shape_.width, lanes<A>, number, of),
            [&](int64_t r, int64_t n, A product) { hidden_[r * shape_.width + n] += product; });
  }

  const Shape shape_;
  const int64_t num_rows_, slot_stride_;
  T *keys_, *values_;
  const int64_t *places_, *pages_;
  const A *cos_, *sin_;
  T* states_;
  std::vector<A> hidden_, queries_, attended_, gate_, up_;
  int64_t most_keys_ = 0;
};

}  // namespace
}  // namespace nvium

#define NVIUM_RUN_BLOCK(T, type)                                                                                  \
  extern "C" void run_block_##type(const nvium::Shape* shape, const void* layers, const void* tensors,            \
                                   const nvium::Rows* rows, int32_t num_threads) {                                \
    nvium::Pass<T> pass(*shape, *static_cast<const nvium::Tensors<T>*>(tensors), *rows);                          \
    pass.run(static_cast<const nvium::Layer<T>*>(layers), num_threads);                                           \
    pass.keep();                                                                                                  \
  }

NVIUM_RUN_BLOCK(double, float64)
NVIUM_RUN_BLOCK(float, float32)
NVIUM_RUN_BLOCK(nvium::BFloat16, bfloat16)
