// Prints the features of the processor that decide how numbers are multiplied.

#include <cstdio>

#include "arithmetic.h"

int main() {
  if (nvium::has_feature(nvium::kAvx512Vnni)) std::puts("avx512_vnni");
  if (nvium::has_feature(nvium::kAvx512Bf16)) std::puts("avx512_bf16");
  if (nvium::has_feature(nvium::kAmxBf16)) std::puts("amx_bf16");
  if (nvium::has_feature(nvium::kAmxInt8)) std::puts("amx_int8");
}
