// Vectors as wide as the processor's registers, and the few functions on them that a Llama needs. Written in GCC's vector
// extensions, so that what differs between processors is one number and the conversions that compilers are bad at.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__AVX2__)
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

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64, kRegisters = 32;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32, kRegisters = 16;
#elif defined(__aarch64__)
constexpr int kVectorBytes = 16, kRegisters = 32;
#else
constexpr int kVectorBytes = 16, kRegisters = 16;
#endif

template <typename E, int Bytes = kVectorBytes> struct VectorOf {
  typedef E type __attribute__((vector_size(Bytes)));
};
template <typename A> using Vector = typename VectorOf<A>::type;
template <typename A> constexpr int64_t lanes = kVectorBytes / sizeof(A);
// As many numbers of E as a vector of A has lanes.
template <typename E, typename A> using Narrow = typename VectorOf<E, lanes<A> * sizeof(E)>::type;

using floats = Vector<float>;
using doubles = Vector<double>;
using ints = Vector<int32_t>;
using longs = Vector<int64_t>;

template <typename V> inline V bits_at(const void* from) {
  V v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

template <typename To, typename From> inline To bits_as(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  return bits_at<To>(&from);
}

inline floats load(const float* from) { return bits_at<floats>(from); }
inline doubles load(const double* from) { return bits_at<doubles>(from); }

// Whole numbers of 8 or 16 bits, as many as there are lanes, as 32 bits: one instruction of which GCC makes several.
#if defined(__AVX512F__)
constexpr __mmask16 kAll = 0xFFFF;  // GCC 12 warns of the functions without one
inline ints widened(const uint16_t* from) { return (ints)_mm512_maskz_cvtepu16_epi32(kAll, bits_at<__m256i>(from)); }
inline ints widened(const uint8_t* from) { return (ints)_mm512_maskz_cvtepu8_epi32(kAll, bits_at<__m128i>(from)); }
inline ints widened(const int8_t* from) { return (ints)_mm512_maskz_cvtepi8_epi32(kAll, bits_at<__m128i>(from)); }
#elif defined(__AVX2__)
inline ints widened(const uint16_t* from) { return (ints)_mm256_cvtepu16_epi32(bits_at<__m128i>(from)); }
inline ints widened(const uint8_t* from) { return (ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from)); }
inline ints widened(const int8_t* from) { return (ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)); }
#else
template <typename E> inline ints widened(const E* from) {
  return __builtin_convertvector(bits_at<Narrow<E, float>>(from), ints);
}
#endif

inline floats load(const BFloat16* from) { return bits_as<floats>(widened(&from->bits) << 16); }

template <typename V, typename A> inline void store(const V& v, A* to) { std::memcpy(to, &v, sizeof v); }

template <typename V> struct MaskOf { using type = ints; };
template <> struct MaskOf<doubles> { using type = longs; };

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
inline floats exp(floats x) {
  const floats bound = x - x + 87.0f;
  x = x < bound ? x : bound;
  x = x > -bound ? x : -bound;
  const floats shifted = x * 1.44269504f + 12582912.0f;  // 1.5 · 2^23: rounds to a whole number in the low bits
  const ints bits = bits_as<ints>(shifted);
  const floats whole = shifted - 12582912.0f;
  const floats rest = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
  floats sum = rest * 1.9875691500e-4f + 1.3981999507e-3f;
  sum = sum * rest + 8.3334519073e-3f;
  sum = sum * rest + 4.1665795894e-2f;
  sum = sum * rest + 1.6666665459e-1f;
  sum = sum * rest + 5.0000001201e-1f;
  sum = sum * rest * rest + rest + 1.0f;
  const ints power = (bits - 0x4B400000 + 127) << 23;
  return sum * bits_as<floats>(power);
}

// The same to within two units of float64's last place; nothing for x below -708, as far as 708 above.
inline doubles exp(doubles x) {
  const longs vanishes = x < -708.0;
  const doubles bound = x - x + 708.0;
  x = x < bound ? x : bound;
  x = x > -bound ? x : -bound;
  const doubles shifted = x * 1.44269504088896338700 + 6755399441055744.0;  // 1.5 · 2^52
  const longs bits = bits_as<longs>(shifted);
  const doubles whole = shifted - 6755399441055744.0;
  const doubles rest = (x - whole * 6.93147180369123816490e-01) - whole * 1.90821492927058770002e-10;
  doubles sum = rest * (1 / 6227020800.0) + 1 / 479001600.0;  // its Taylor series up to the 13th power
  for (const double factorial :
       {39916800.0, 3628800.0, 362880.0, 40320.0, 5040.0, 720.0, 120.0, 24.0, 6.0, 2.0, 1.0, 1.0})
    sum = sum * rest + 1 / factorial;
  const longs power = (bits - 0x4338000000000000 + 1023) << 52;
  return vanishes ? doubles{} : sum * bits_as<doubles>(power);
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
  if (i < length) {  // as the others: equal numbers stay equal wherever they stand
    A rest[lanes<A>] = {};
    std::copy(x + i, x + length, rest);
    store(exp(load(rest) - offset), rest);
    for (A* e = rest; i < length; ++i) sum += x[i] = *e++;
  }
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
