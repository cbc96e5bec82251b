// Computes e^x. Converts all halves to floats and back, and floats between two halves. Prints the first x or half that is
// wrong.

#include <cstdio>

#include "arithmetic.h"

using namespace nvium;

namespace {

uint16_t rounded(float x) { return Half(x).bits; }

float value(uint16_t bits) {
  Half half;
  half.bits = bits;
  return static_cast<float>(half);
}

bool is_loaded(uint16_t bits) {
  Half many[lanes<float>];
  for (Half& each : many) each.bits = bits;
  const float expected = value(bits), found = load(many)[0];
  return std::isnan(expected) ? std::isnan(found) : std::bit_cast<uint32_t>(found) == std::bit_cast<uint32_t>(expected);
}

bool is_right(uint16_t bits) {
  const float x = value(bits);
  if (!is_loaded(bits) || !is_loaded(bits | 0x8000)) return false;
  if (bits > 0x7C00) return std::isnan(x) && rounded(x) == 0x7E00;
  if (bits == 0x7C00) return std::isinf(x) && rounded(x) == bits && rounded(-x) == 0xFC00;
  const float next = bits == 0x7BFF ? 65536 : value(bits + 1), middle = (x + next) / 2;
  const int fraction = bits & 0x3FF, exponent = bits >> 10;
  return x == std::ldexp(exponent ? 0x400 | fraction : fraction, std::max(exponent, 1) - 25) && rounded(x) == bits &&
         rounded(-x) == (bits | 0x8000) && rounded(middle) == bits + bits % 2 &&
         rounded(std::nextafter(middle, 0.0f)) == bits && rounded(std::nextafter(middle, next)) == bits + 1;
}

bool has_power(float x) {
  const double expected = std::exp(static_cast<double>(x));
  return std::abs(exp(floats{} + x)[lanes<float> - 1] / expected - 1) <= 3e-7 + 8e-8 * std::abs(x);
}

}  // namespace

int main() {
  for (float x = -87; x <= 87; x += 0x1p-9f)
    if (!has_power(x)) return std::printf("e^%f\n", x), 0;
  for (const int32_t bits : {0x7FC00000, 0x7FC00001, 0x7FFFFFFF, -1})
    if (!std::isnan(exp(bits_as<floats>(ints{} + bits))[0])) std::puts("e^x is a number, x is none");
  for (const float x : {88.8f, 1e30f, INFINITY})
    if (!(exp(floats{} + x)[0] > 6e37f) || !(exp(floats{} - x)[0] < 2e-38f)) std::printf("e^±%f\n", x);
  for (int bits = 0; bits < 0x8000; ++bits)
    if (!is_right(bits)) return std::printf("%04x\n", bits), 0;
  if (rounded(1e30f) != 0x7C00 || rounded(1e-30f)) std::puts("out of range");
}
