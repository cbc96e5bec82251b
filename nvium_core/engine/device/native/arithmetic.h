// Vectors of 64 bytes, and the few functions on them that a Llama needs. Any compiler that knows GCC's vector
// extensions turns them into what its processor has.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace nvium {

// As PyTorch has it: the upper half of a float, rounded to the nearest, ties to even.
struct BFloat16 {
  uint16_t bits;

  BFloat16() = default;
  explicit BFloat16(float x) {
    uint32_t whole;
    std::memcpy(&whole, &x, sizeof whole);
    bits = x != x ? 0x7FC0 : static_cast<uint16_t>((whole + 0x7FFF + (whole >> 16 & 1)) >> 16);
  }
  explicit operator float() const {
    const uint32_t whole = static_cast<uint32_t>(bits) << 16;
    float x;
    std::memcpy(&x, &whole, sizeof x);
    return x;
  }
};

// Caches are stored as T, weights as W, which may be narrower; sums are made in A, float32 or better.
template <typename T> struct AccumulatorOf { using type = float; };
template <> struct AccumulatorOf<double> { using type = double; };
template <typename T> using Accumulator = typename AccumulatorOf<T>::type;

using float16 = float __attribute__((vector_size(64)));
using double8 = double __attribute__((vector_size(64)));
using ushort16 = uint16_t __attribute__((vector_size(32)));
using int16 = int32_t __attribute__((vector_size(64)));
using uint16 = uint32_t __attribute__((vector_size(64)));
using long8 = int64_t __attribute__((vector_size(64)));

template <typename A> struct VectorOf;
template <> struct VectorOf<float> { using type = float16; };
template <> struct VectorOf<double> { using type = double8; };
template <typename A> using Vector = typename VectorOf<A>::type;
template <typename A> constexpr int64_t lanes = 64 / sizeof(A);

inline float16 load(const float* from) {
  float16 v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

inline double8 load(const double* from) {
  double8 v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

inline float16 load(const BFloat16* from) {
  ushort16 bits;
  std::memcpy(&bits, from, sizeof bits);
#ifdef __AVX512F__  // of which GCC 12 makes five instructions by itself
  const uint16 widened = (uint16)_mm512_cvtepu16_epi32((__m256i)bits) << 16;
#else
  const uint16 widened = __builtin_convertvector(bits, uint16) << 16;
#endif
  float16 v;
  std::memcpy(&v, &widened, sizeof v);
  return v;
}

template <typename V, typename A> inline void store(const V& v, A* to) { std::memcpy(to, &v, sizeof v); }

template <typename V> struct MaskOf { using type = int16; };
template <> struct MaskOf<double8> { using type = long8; };

// Of blocks of 2W lanes in a and b, the sums of their halves: a's first, b's first, a's second, ...
template <int W, typename V, size_t... I> inline V folded(const V& a, const V& b, std::index_sequence<I...>) {
  constexpr int L = sizeof...(I);
  using Mask = typename MaskOf<V>::type;
  constexpr Mask first{static_cast<int>(I / W % 2 * L + I / (2 * W) * 2 * W + I % W)...};
  return __builtin_shuffle(a, b, first) + __builtin_shuffle(a, b, first + W);
}

// The sums of as many vectors as they have lanes, each in the same order. Overwrites them.
template <int W, typename A> inline Vector<A> totals(Vector<A>* sums) {
  for (int i = 0; i < W; ++i) sums[i] = folded<W>(sums[i], sums[i + W], std::make_index_sequence<lanes<A>>());
  if constexpr (W == 1)
    return sums[0];
  else
    return totals<W / 2, A>(sums);
}

// The sum of a vector's lanes, in the order of `totals`.
template <typename A> inline A total(Vector<A> v) {
  for (int w = lanes<A> / 2; w; w /= 2)
    for (int i = 0; i < w; ++i) v[i] += v[i + w];
  return v[0];
}

// e^x, to within a few units of float32's last place, for x of at most 87 either way; NaN stays NaN.
inline float16 exp(float16 x) {
  const float16 bound = x - x + 87.0f;
  x = x < bound ? x : bound;
  x = x > -bound ? x : -bound;
  const float16 shifted = x * 1.44269504f + 12582912.0f;  // 1.5 · 2^23: rounds to a whole number in the low bits
  int16 bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  const float16 whole = shifted - 12582912.0f;
  const float16 rest = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
  float16 sum = rest * 1.9875691500e-4f + 1.3981999507e-3f;
  sum = sum * rest + 8.3334519073e-3f;
  sum = sum * rest + 4.1665795894e-2f;
  sum = sum * rest + 1.6666665459e-1f;
  sum = sum * rest + 5.0000001201e-1f;
  sum = sum * rest * rest + rest + 1.0f;
  int16 power = (bits - 0x4B400000 + 127) << 23;
  float16 scale;
  std::memcpy(&scale, &power, sizeof scale);
  return sum * scale;
}

// The same to within two units of float64's last place; nothing for x below -708, as far as 708 above.
inline double8 exp(double8 x) {
  const long8 vanishes = x < -708.0;
  const double8 bound = x - x + 708.0;
  x = x < bound ? x : bound;
  x = x > -bound ? x : -bound;
  const double8 shifted = x * 1.44269504088896338700 + 6755399441055744.0;  // 1.5 · 2^52
  long8 bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  const double8 whole = shifted - 6755399441055744.0;
  const double8 rest = (x - whole * 6.93147180369123816490e-01) - whole * 1.90821492927058770002e-10;
  double8 sum = rest * (1 / 6227020800.0) + 1 / 479001600.0;  // its Taylor series up to the 13th power
  for (const double factorial :
       {39916800.0, 3628800.0, 362880.0, 40320.0, 5040.0, 720.0, 120.0, 24.0, 6.0, 2.0, 1.0, 1.0})
    sum = sum * rest + 1 / factorial;
  const long8 power = (bits - 0x4338000000000000 + 1023) << 52;
  double8 scale;
  std::memcpy(&scale, &power, sizeof scale);
  return vanishes ? double8{} : sum * scale;
}

// x y / (1 + e^-x), in place of x.
template <typename A> inline void silu_times(A* x, const A* y, int64_t length) {
  int64_t i = 0;
  for (; i + lanes<A> <= length; i += lanes<A>) {
    const Vector<A> x_i = load(x + i);
    store(x_i * load(y + i) / (exp(-x_i) + 1), x + i);
  }
  for (; i < length; ++i) x[i] = x[i] * y[i] / (1 + std::exp(-x[i]));
}

// e^(x - offset) in place of x; returns their sum.
template <typename A> inline A exponentials(A* x, A offset, int64_t length) {
  Vector<A> sums{};
  int64_t i = 0;
  for (; i + lanes<A> <= length; i += lanes<A>) {
    const Vector<A> e = exp(load(x + i) - offset);
    store(e, x + i);
    sums += e;
  }
  A sum = total<A>(sums);
  for (; i < length; ++i) sum += x[i] = std::exp(x[i] - offset);
  return sum;
}

// log(1 + e^x)
template <typename A> inline A softplus(A x) { return std::max(x, A(0)) + std::log1p(std::exp(-std::abs(x))); }

template <typename A> inline A gelu(A x) { return x * A(0.5) * (1 + std::erf(x * A(0.70710678118654752440))); }

// Σ a_i b_i, in an order that depends on the length alone.
template <typename A, typename T> inline A dot(const A* a, const T* b, int64_t length) {
  Vector<A> sums{};
  int64_t i = 0;
  for (; i + lanes<A> <= length; i += lanes<A>) sums += load(a + i) * load(b + i);
  A sum = total<A>(sums);
  for (; i < length; ++i) sum += a[i] * static_cast<A>(b[i]);
  return sum;
}

// Of a vector x and as many rows of a matrix, `stride` apart, as a vector has lanes: their products, each summed as `dot`
// does.
template <typename A, typename T> inline Vector<A> products(const A* x, const T* matrix, int64_t stride, int64_t length) {
  Vector<A> sums[lanes<A>]{};
  int64_t i = 0;
  for (; i + lanes<A> <= length; i += lanes<A>) {
    const Vector<A> x_i = load(x + i);
    for (int n = 0; n < lanes<A>; ++n) sums[n] += x_i * load(matrix + n * stride + i);
  }
  Vector<A> out = totals<lanes<A> / 2, A>(sums);
  for (; i < length; ++i)
    for (int n = 0; n < lanes<A>; ++n) out[n] += x[i] * static_cast<A>(matrix[n * stride + i]);
  return out;
}

}  // namespace nvium
