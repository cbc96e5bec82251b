// SIMD vectors as wide as the build's registers, and the functions on them that a Llama needs. With the vector
// extensions of GCC and Clang, builds differ only in the width, and in a few functions for which compilers generate slow code.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace nvium {

#if defined(__x86_64__)
// Features as bits of CPUID's leaf 7: of ECX, of EDX, then of EAX of its second part.
constexpr int kAvx512Vnni = 11, kAmxBf16 = 32 + 22, kAmxInt8 = 32 + 25, kAvx512Bf16 = 64 + 5;

// Return true if the processor has this feature. Compiled by Zig, `__builtin_cpu_supports` is always false.
inline bool has_feature(int bit) {
  unsigned a = 0, b = 0, c = 0, d = 0;
  __get_cpuid_count(7, bit / 64, &a, &b, &c, &d);
  return (bit < 32 ? c : bit < 64 ? d : a) >> bit % 32 & 1;
}
#endif

// The upper 16 bits of a float. Conversion rounds to nearest, ties to even, as in PyTorch.
struct BFloat16 {
  uint16_t bits;

  BFloat16() = default;
  explicit BFloat16(float x) {
    const auto whole = std::bit_cast<uint32_t>(x);
    bits = x != x ? 0x7FC0 : static_cast<uint16_t>((whole + 0x7FFF + (whole >> 16 & 1)) >> 16);
  }
  explicit operator float() const { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }
};

// An IEEE half. Conversion rounds like BFloat16's; larger numbers than the largest half become infinite.
struct Half {
  uint16_t bits;

  Half() = default;
  explicit Half(float x) {
    const auto whole = std::bit_cast<uint32_t>(x), size = whole & 0x7FFFFFFF;
    uint32_t rounded = (size - 0x38000000 + 0xFFF + (size >> 13 & 1)) >> 13;
    if (size < 0x38800000)  // the half is a multiple of 2^-24, like floats from .5 on
      rounded = std::bit_cast<uint32_t>(std::bit_cast<float>(size) + 0.5f) - 0x3F000000;
    if (size >= 0x47800000) rounded = size > 0x7F800000 ? 0x7E00 : 0x7C00;
    bits = static_cast<uint16_t>(rounded | (whole >> 16 & 0x8000));
  }
  explicit operator float() const {  // in a float, a half's bits are a number that is 2^112 times too small
    auto size = std::bit_cast<uint32_t>(std::bit_cast<float>((bits & 0x7FFFu) << 13) * 0x1p112f);
    if ((bits & 0x7C00) == 0x7C00) size |= 0x7F800000;
    return std::bit_cast<float>(size | (bits & 0x8000u) << 16);
  }
};

// Hidden states have type T, and sums have type Accumulator<T>: double for double, float for all others.
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
// A vector with elements of type E and with as many lanes as a Vector<A>.
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

// Load one 8- or 16-bit integer per lane and widen it to 32 bits. An intrinsic is faster than GCC's own code.
#if defined(__AVX512F__)
constexpr __mmask16 kAll = 0xFFFF;  // GCC 12 warns about the unmasked intrinsics
inline ints widened(const uint16_t* from) { return (ints)_mm512_maskz_cvtepu16_epi32(kAll, bits_at<__m256i>(from)); }
inline ints widened(const int8_t* from) { return (ints)_mm512_maskz_cvtepi8_epi32(kAll, bits_at<__m128i>(from)); }
#elif defined(__AVX2__)
inline ints widened(const uint16_t* from) { return (ints)_mm256_cvtepu16_epi32(bits_at<__m128i>(from)); }
inline ints widened(const int8_t* from) { return (ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)); }
#else
template <typename E> inline ints widened(const E* from) {
  return __builtin_convertvector(bits_at<Narrow<E, float>>(from), ints);
}
#endif

inline doubles load_doubles(const float* from) { return __builtin_convertvector(bits_at<Narrow<float, double>>(from), doubles); }
inline doubles load_doubles(const double* from) { return load(from); }

inline floats halves(const char* at) {
#if defined(__AVX512F__)
  return (floats)_mm512_maskz_cvtph_ps(kAll, bits_at<__m256i>(at));
#elif defined(__F16C__)
  return (floats)_mm256_cvtph_ps(bits_at<__m128i>(at));
#else
  const ints bits = widened(reinterpret_cast<const uint16_t*>(at));
  const floats size = bits_as<floats>((bits & 0x7FFF) << 13) * 0x1p112f;
  const ints infinite = ((bits & 0x7C00) == 0x7C00) & 0x7F800000;
  return bits_as<floats>(bits_as<ints>(size) | infinite | (bits & 0x8000) << 16);
#endif
}

inline floats load(const Half* from) { return halves(reinterpret_cast<const char*>(from)); }
inline floats load(const BFloat16* from) { return bits_as<floats>(widened(&from->bits) << 16); }

// Two numbers that are multiplied by two others at once. A vector of them is `ints`. Floats are rounded to pairs in place.
struct __attribute__((may_alias)) BFloat16Pair {
  BFloat16 first, second;
};

inline ints load(const BFloat16Pair* from) { return bits_at<ints>(from); }

// Return pairs of a number of a and one of b.
inline ints pairs_of(const BFloat16* a, const BFloat16* b) { return widened(&a->bits) | widened(&b->bits) << 16; }

// Return sums + x · y, of pairs both products.
template <typename A, typename V> inline V plus_products(V sums, A x, V y) { return sums + x * y; }

#if defined(__AVX512F__)
inline const bool kHasPairs = has_feature(kAvx512Bf16);

inline floats plus_products(floats sums, BFloat16Pair x, ints y) {
  asm("vdpbf16ps %2, %1, %0" : "+v"(sums) : "v"(ints{} + bits_as<int32_t>(x)), "v"(y));
  return sums;
}

// Round x, whose length is padded to whole vectors. `out` may begin where x does.
inline void round_to_pairs(const float* x, int64_t length, void* out) {
  for (int64_t i = 0; i < length; i += lanes<float>) {
    Narrow<uint16_t, float> rounded;
    asm("vcvtneps2bf16 %1, %0" : "=v"(rounded) : "v"(load(x + i)));
    std::memcpy(static_cast<BFloat16*>(out) + i, &rounded, sizeof rounded);
  }
}
#else
constexpr bool kHasPairs = false;
#endif

template <typename V, typename A> inline void store(const V& v, A* to) { std::memcpy(to, &v, sizeof v); }

// Combine numbers by an associative f: first those half of the length apart. Overwrites x.
template <typename A, size_t N, typename F> inline A combined(A (&x)[N], const F& f) {
  for (size_t w = N / 2; w; w /= 2)
    for (size_t j = 0; j < w; ++j) x[j] = f(x[j], x[j + w]);
  return x[0];
}

template <typename A> inline A total(const Vector<A>& v) {
  A x[lanes<A>];
  for (int64_t i = 0; i < lanes<A>; ++i) x[i] = v[i];
  return combined(x, std::plus());
}

// Return e^x with a relative error of at most 3e-7 + 8e-8 |x|. NaN stays NaN. Without AVX-512, x is clamped to ±87.
inline floats exp(floats x) {
#if defined(__AVX512F__)
  const floats power = x * 1.44269504f, rest = (floats)_mm512_maskz_reduce_ps(kAll, (__m512)power, 0);
#else
  x = x > 87.0f ? floats{} + 87.0f : x;
  x = x < -87.0f ? floats{} - 87.0f : x;
  const floats shifted = x * 1.44269504f + 12582912.0f;  // adding 1.5 · 2^23 rounds to an integer
  const floats rest = x * 1.44269504f - (shifted - 12582912.0f);
#endif
  floats sum = rest * 1.3390932281e-3f + 9.6761015905e-3f;  // 2^rest
  sum = sum * rest + 5.5503569849e-2f;
  sum = sum * rest + 2.4022106178e-1f;
  sum = sum * rest + 6.9314718805e-1f;
  sum = sum * rest + 1.0f;
#if defined(__AVX512F__)
  return (floats)_mm512_maskz_scalef_ps(kAll, (__m512)sum, (__m512)(power - rest));  // an integer: scalef rounds down
#else
  return sum * bits_as<floats>((bits_as<ints>(shifted) << 23) + 0x3F800000);
#endif
}

// Return e^x to within two ulp, or 0 if x < `least`, which must be at least -708. x is clamped to at most 708.
inline doubles exp(doubles x, double least = -708.0) {
  constexpr double of_powers[] = {  // Taylor coefficients of x^13, …, x^0
      1 / 6227020800.0, 1 / 479001600.0, 1 / 39916800.0, 1 / 3628800.0, 1 / 362880.0, 1 / 40320.0, 1 / 5040.0,
      1 / 720.0,        1 / 120.0,       1 / 24.0,       1 / 6.0,       1 / 2.0,      1.0,         1.0};
  const longs vanishes = x < least;
  x = x > 708.0 ? doubles{} + 708.0 : x;  // NaN stays NaN
  x = bits_as<doubles>(bits_as<longs>(x) & ~vanishes);
  const doubles shifted = x * 1.44269504088896338700 + 6755399441055744.0;  // adding 1.5 · 2^52 rounds
  const doubles whole = shifted - 6755399441055744.0;
  const doubles rest = (x - whole * 6.93147180369123816490e-01) - whole * 1.90821492927058770002e-10;
  doubles sum{};
#pragma GCC unroll 16
  for (const double coefficient : of_powers) sum = sum * rest + coefficient;
  const longs power = (bits_as<longs>(shifted) + 1023) << 52;
  const doubles product = sum * bits_as<doubles>(power);
  return bits_as<doubles>(bits_as<longs>(product) & ~vanishes);
}

// x = x · σ(g(x)) · y, without the factor y if it is null
template <typename A, typename G> inline void sigmoid_times(A* x, const A* y, int64_t length, G&& g) {
  int64_t i = 0;
  for (; i + lanes<A> <= length; i += lanes<A>) {
    const Vector<A> x_i = load(x + i);
    store((y ? x_i * load(y + i) : x_i) / (exp(-g(x_i)) + 1), x + i);
  }
  for (; i < length; ++i) x[i] = (y ? x[i] * y[i] : x[i]) / (1 + std::exp(-g(x[i])));
}

// x = SiLU(x) · y
template <typename A> inline void silu_times(A* x, const A* y, int64_t length) {
  sigmoid_times(x, y, length, [](auto value) { return value; });
}

// x = c · tanh(x / c)
template <typename A> inline void limit(A* x, A cap, int64_t length) {
  for (A part[lanes<A>]{}; length > 0; x += lanes<A>, length -= lanes<A>) {
    const int64_t count = std::min(length, int64_t{lanes<A>});
    std::copy_n(x, count, part);
    store(cap - 2 * cap / (exp(load(part) * (2 / cap)) + 1), part);
    std::copy_n(part, count, x);
  }
}

// Replace x by e^(x - offset) and return the sum.
template <typename A> inline A exponentials(A* x, A offset, int64_t length) {
  Vector<A> sums{};
  int64_t i = 0;
  for (; i + lanes<A> <= length; i += lanes<A>) {
    const Vector<A> e = exp(load(x + i) - offset);
    store(e, x + i);
    sums += e;
  }
  A sum = total<A>(sums);
  if (i < length) {  // use the same exp as above, so that equal inputs give equal results at every position
    A rest[lanes<A>] = {};
    std::copy(x + i, x + length, rest);
    store(exp(load(rest) - offset), rest);
    for (A* e = rest; i < length; ++i) sum += x[i] = *e++;
  }
  return sum;
}

template <typename A> inline A largest(const A* x, int64_t length) {
  A most = x[0];
  int64_t i = 0;
  if (constexpr int kChains = 4; length >= kChains * lanes<A>) {
    const auto larger = [](const auto& a, const auto& b) { return a > b ? a : b; };  // b if a is NaN
    Vector<A> mosts[kChains];
    for (auto& each : mosts) each = Vector<A>{} + most;
    for (; i + kChains * lanes<A> <= length; i += kChains * lanes<A>)
      for (int n = 0; n < kChains; ++n) mosts[n] = larger(load(x + i + n * lanes<A>), mosts[n]);
    for (const auto& each : mosts) mosts[0] = larger(each, mosts[0]);
    A each_lane[lanes<A>];
    store(mosts[0], each_lane);
    most = combined(each_lane, larger);
  }
  for (; i < length; ++i) most = std::max(most, x[i]);
  return most;
}

// log(1 + e^x)
template <typename A> inline A softplus(A x) { return std::max(x, A(0)) + std::log1p(std::exp(-std::abs(x))); }

template <typename A> inline A gelu(A x) { return x * A(0.5) * (1 + std::erf(x * A(0.70710678118654752440))); }

// Return Σ a_i b_i. The order of the additions depends only on `length`.
template <typename A, typename T> inline A dot(const A* a, const T* b, int64_t length) {
  Vector<A> sums{};
  int64_t i = 0;
  for (; i + lanes<A> <= length; i += lanes<A>) sums += load(a + i) * load(b + i);
  A sum = total<A>(sums);
  for (; i < length; ++i) sum += a[i] * static_cast<A>(b[i]);
  return sum;
}

}  // namespace nvium
