// Multiplies rows by a packed matrix [N, length]. Also has RMSNorm.
//
// A matrix is packed for the vector width of one build. A vector interleaves `lanes` rows of the matrix element by
// element, so that each lane sums one row. A panel is up to kPanelVectors vectors, interleaved step by step (a step is
// one or two elements), so that memory is read in order. The last vector is padded with zeros.
#pragma once

#include "tiles.h"
#include "thread_pool.h"

namespace nvium {

// A packed matrix. It has the numbers of a `Stored` type.
struct Matrix {
  int64_t kind;
  const char* data;

  explicit operator bool() const { return data; }
  bool is_quantized() const { return block_shape(kind).elements; }
};

template <typename A> constexpr int kPanelVectors = std::is_same_v<A, float> ? kPanel : 1;
// Number of vectors to multiply at once if there are many rows.
template <typename A> constexpr int kVectorsAtOnce = std::min(kPanelVectors<A>, kRegisters == 32 ? 4 : 2);
// Maximum rows to multiply by K vectors at once, few enough that all sums fit in registers.
template <typename A, int K>
constexpr int kMaxRows = std::is_same_v<A, float> ? (kRegisters == 32 ? 24 : 12) / std::max(K, 2) : 3;

// A panel's first byte, its number of vectors, and the first vector to use.
struct Panel {
  const char* data;
  int64_t vectors, first;
};

// Add the dot products of R rows of x and K vectors to `sums`. The order of the additions does not depend on R or K, so
// a row's results do not depend on the batch. If `panel.first` is 0, prefetch all vectors of the panel.
template <typename F, int R, int K, typename A>
inline void add_products(const A* x, int64_t length, const char* steps, const Panel& panel, int64_t count,
                         Vector<A> (&sums)[K][R]) {
  const int64_t stride = panel.vectors * kVectorBytes, prefetched = panel.first ? 0 : stride;
  const char* at = steps + panel.first * kVectorBytes;
  Vector<A> own[K][R];  // a local copy stays in registers; `sums` would be stored to memory at every step
  for (int k = 0; k < K; ++k)
    for (int r = 0; r < R; ++r) own[k][r] = sums[k][r];
  for (int64_t s = 0; s < count; ++s, at += stride, x += F::kStep) {
    for (int64_t b = 0; b < prefetched; b += 64) __builtin_prefetch(at + b + kPrefetchBytes);
    for (int e = 0; e < F::kStep; ++e) {
      Vector<A> w[K];
      for (int k = 0; k < K; ++k) w[k] = F::unpack(at + k * kVectorBytes, e);
      for (int r = 0; r < R; ++r)
        for (int k = 0; k < K; ++k) own[k][r] += w[k] * x[r * length + e];
    }
  }
  for (int k = 0; k < K; ++k)
    for (int r = 0; r < R; ++r) sums[k][r] = own[k][r];
}

template <typename F, int R, int K, typename A>
void panel_products(const A* x, int64_t length, const Panel& panel, Vector<A> (&sums)[K][R]) {
  const int64_t count = length / F::kStep;
  add_products<F>(x, length, panel.data, panel, count, sums);
  if (length % F::kStep == 0) return;
  for (int k = 0; k < K; ++k) {
    const Vector<A> w = F::unpack(panel.data + (count * panel.vectors + panel.first + k) * kVectorBytes, 0);
    for (int r = 0; r < R; ++r) sums[k][r] += w * x[r * length + length - 1];
  }
}

// Multiply 1 to R rows by K vectors of a panel. Call use(row, vector, products) with the vector's number in the panel.
template <typename F, int R, int K, typename A, typename Use>
void multiply_up_to(int64_t num_rows, const A* x, int64_t length, const Panel& panel, Use&& use) {
  if constexpr (R > 1)
    if (num_rows < R) return multiply_up_to<F, R - 1, K>(num_rows, x, length, panel, use);
  Vector<A> sums[K][R] = {};
  panel_products<F>(x, length, panel, sums);
  for (int r = 0; r < R; ++r)
    for (int k = 0; k < K; ++k) use(r, panel.first + k, sums[k][r]);
}

// Do the same for any number of rows, in parts of equal size.
template <typename F, int K, typename A, typename Use>
void multiply_all(int64_t num_rows, const A* x, int64_t length, const Panel& panel, Use&& use) {
  constexpr int64_t most = kMaxRows<A, K>;
  const int64_t passes = (num_rows + most - 1) / most, rows_per_pass = (num_rows + passes - 1) / passes;
  for (int64_t row = 0; row < num_rows; row += rows_per_pass)
    multiply_up_to<F, most, K>(std::min(rows_per_pass, num_rows - row), x + row * length, length, panel,
                               [&](int r, int64_t vector, const Vector<A>& products) { use(row + r, vector, products); });
}

// With few rows, multiply all vectors of the panel at once, which gives the processor enough independent sums. With
// many rows, multiply fewer vectors at once, so that the sums fit in registers.
template <typename F, typename A, typename Use>
void multiply_panel(int64_t num_rows, const A* x, int64_t length, Panel panel, Use&& use) {
  constexpr int all = kPanelVectors<A>, some = kVectorsAtOnce<A>;
  while (panel.first < panel.vectors) {
    const int64_t left = panel.vectors - panel.first;
    if (left >= all && num_rows <= kMaxRows<A, all>)
      multiply_all<F, all>(num_rows, x, length, panel, use), panel.first += all;
    else if (left >= some)
      multiply_all<F, some>(num_rows, x, length, panel, use), panel.first += some;
    else
      multiply_all<F, 1>(num_rows, x, length, panel, use), panel.first += 1;
  }
}

// Return the bytes of one packed vector.
template <typename F> constexpr int64_t packed_bytes(int64_t length) {
  return (length + F::kStep - 1) / F::kStep * kVectorBytes;
}

template <typename A> constexpr int64_t panel_rows = kPanelVectors<A> * lanes<A>;
template <typename A> constexpr int64_t num_panels(int64_t count) { return (count + panel_rows<A> - 1) / panel_rows<A>; }

// Rows [R, length] to multiply, and the same rows in the forms that some matrices need.
template <typename A> struct Operand {
  const A* x;
  int64_t num_rows, length;
  const RoundedRows* rounded = nullptr;
  const ByteRows* bytes = nullptr;   // null if no tiles of bytes are used
  const TiledRows* tiled = nullptr;  // null if no tiles of bfloat16 are used
};

// Memory for the forms of an operand.
struct Forms {
  RoundedRows rounded;
  ByteRows bytes;
  TiledRows tiled;
};

// Return rows to multiply by these matrices. They are valid until `forms` is used again. `tile_parts`: number of bfloat16
// parts of each number in AMX tiles, 0 without tiles.
template <typename A>
Operand<A> operand(int num_threads, const A* x, int64_t num_rows, int64_t length, std::initializer_list<Matrix> weights,
                   int64_t tile_parts, Forms& forms) {
  Operand<A> out{x, num_rows, length};
  if constexpr (std::is_same_v<A, float>) {
    const auto parallel = [&](auto&& form) { ThreadPool::shared().run(num_threads, num_rows, form); };
    for (const Matrix& weight : weights)
      if (kMayTile<A> && tile_parts && weight.kind == kStoredBF16 && length % kTileDepth == 0)
        out.tiled = &forms.tiled;
      else if (kMayTile<A> && tile_parts && fits_byte_tiles(weight.kind))
        out.bytes = &forms.bytes;
      else if (weight.is_quantized())
        out.rounded = &forms.rounded;
    if (out.rounded) {
      forms.rounded.resize(num_rows, length);
      parallel([&](int64_t begin, int64_t end) { round_rows(x, length, begin, end, forms.rounded); });
    }
    if constexpr (kMayTile<A>) {
      if (out.bytes) {
        forms.bytes.resize(num_rows, length);
        parallel([&](int64_t begin, int64_t end) { round_blocks(x, length, begin, end, forms.bytes); });
      }
      if (out.tiled) {
        forms.tiled.resize(num_rows, length, tile_parts);
        parallel([&](int64_t begin, int64_t end) { split_rows(x, length, begin, end, forms.tiled); });
      }
    }
  }
  return out;
}

template <typename F, typename A, typename Use>
void project_panel(const Operand<A>& in, const char* panel, int64_t vectors, Use&& use) {
  if constexpr (kMayTile<A> && std::is_same_v<F, Pairs>)
    if (in.tiled)
      return in.tiled->num_parts == 1 ? multiply_tiled<1>(*in.tiled, in.num_rows, panel, vectors, use)
                                      : multiply_tiled<kTileParts>(*in.tiled, in.num_rows, panel, vectors, use);
  multiply_panel<F>(in.num_rows, in.x, in.length, {panel, vectors, 0}, use);
}

// Compute Σ_d x[r, d] W[n, d] for the rows n of W in panels [begin, end). Call use(r, n, products, count) with the
// products of rows n … n + count - 1 of W.
template <typename A, typename Use>
void project(const Operand<A>& in, const Matrix& matrix, int64_t count, int64_t begin, int64_t end, Use&& use) {
  const int64_t vectors = (count + lanes<A> - 1) / lanes<A>;
  for (int64_t panel = begin; panel < end; ++panel) {
    const int64_t before = panel * kPanelVectors<A>, here = std::min<int64_t>(kPanelVectors<A>, vectors - before);
    const auto use_vector = [&](int64_t r, int64_t vector, const Vector<A>& products) {
      const int64_t n = (before + vector) * lanes<A>;
      if (n < count) use(r, n, reinterpret_cast<const A*>(&products), std::min(lanes<A>, count - n));
    };
    if constexpr (std::is_same_v<A, float>) {
      if (matrix.is_quantized()) {
        const Packing packing = block_shape(matrix.kind).packing;
        const char* at = matrix.data + panel * panel_rows<A> * lane_bytes(packing, in.length);
        if constexpr (kMayTile<A>)
          if (in.bytes && fits_byte_tiles(matrix.kind)) {
            with_numbers(packing.bits, [&]<typename N>(N) {
              multiply_blocks<N>(*in.bytes, in.num_rows, packing, at, use_vector);
            });
            continue;
          }
        multiply_rounded(*in.rounded, in.num_rows, packing, at, use_vector);
        continue;
      }
      if (matrix.kind == kStoredBF16 || matrix.kind == kStoredF16) {
        const char* at = matrix.data + before * packed_bytes<Pairs>(in.length);
        matrix.kind == kStoredF16 ? project_panel<Halves>(in, at, here, use_vector)
                                  : project_panel<Pairs>(in, at, here, use_vector);
        continue;
      }
    }
    project_panel<Plain<A>>(in, matrix.data + before * packed_bytes<Plain<A>>(in.length), here, use_vector);
  }
}

// Write the results of `project` to y [R, N].
template <typename A>
void project_into(const Operand<A>& in, const Matrix& matrix, int64_t count, int64_t begin, int64_t end, A* y) {
  project(in, matrix, count, begin, end, [&](int64_t r, int64_t n, const A* products, int64_t num) {
    A* const to = y + r * count + n;
    num == lanes<A> ? store(load(products), to) : (void)std::copy_n(products, num, to);
  });
}

template <typename A> void rms_norm(const A* h, const A* weight, int64_t width, A eps, A* x) {
  const A scale = 1 / std::sqrt(dot(h, h, width) / width + eps);
  for (int64_t d = 0; d < width; ++d) x[d] = h[d] * scale * weight[d];
}

}  // namespace nvium
