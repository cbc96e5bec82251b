// The numbers that decide what a front does, as nvium_core/engine/randomness.py makes them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "arithmetic.h"

namespace nvium {

// So many keys' at once.
typedef uint64_t Keys __attribute__((vector_size(kVectorBytes)));
constexpr int64_t kKeys = kVectorBytes / sizeof(uint64_t);

// BLAKE2b (RFC 7693) of 8 bytes, of a message of at most one block, or of as many as W has lanes.
template <typename W> W blake2b_8(const W (&words)[16], uint64_t length) {
  constexpr uint64_t initial[8] = {0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b, 0xa54ff53a5f1d36f1,
                                   0x510e527fade682d1, 0x9b05688c2b3e6c1f, 0x1f83d9abfb41bd6b, 0x5be0cd19137e2179};
  constexpr uint8_t order[10][16] = {
      {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
      {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4}, {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
      {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13}, {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
      {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11}, {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
      {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5}, {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0}};
  W v[16];
  const uint64_t first = initial[0] ^ 0x01010000 ^ 8;  // no key, one leaf, a digest of 8 bytes
  for (int i = 0; i < 8; ++i) v[i] = v[i + 8] = W{} + initial[i];
  v[0] = W{} + first;
  v[12] ^= length;
  v[14] = ~v[14];  // the last block
  const auto rotated = [](W x, int by) { return x >> by | x << (64 - by); };
  const auto mix = [&](int a, int b, int c, int d, W x, W y) {
    v[a] += v[b] + x, v[d] = rotated(v[d] ^ v[a], 32);
    v[c] += v[d], v[b] = rotated(v[b] ^ v[c], 24);
    v[a] += v[b] + y, v[d] = rotated(v[d] ^ v[a], 16);
    v[c] += v[d], v[b] = rotated(v[b] ^ v[c], 63);
  };
  for (int round = 0; round < 12; ++round) {
    const uint8_t* s = order[round % 10];
    for (int i = 0; i < 4; ++i) mix(i, i + 4, i + 8, i + 12, words[s[2 * i]], words[s[2 * i + 1]]);
    for (int i = 0; i < 4; ++i)
      mix(i, (i + 1) % 4 + 4, (i + 2) % 4 + 8, (i + 3) % 4 + 12, words[s[2 * i + 8]], words[s[2 * i + 9]]);
  }
  return first ^ v[0] ^ v[8];
}

inline double of_53_bits(uint64_t hash) { return static_cast<double>(hash >> 11) * 0x1p-53; }

// Five letters.
inline uint64_t word_of(const char* purpose) {
  uint64_t word = 0;
  std::memcpy(&word, purpose, 5);
  return word;
}

constexpr uint64_t kKeyLength = 37;

// In [0, 1), of 53 bits. `purpose` has five letters.
inline double uniform(int64_t seed, int64_t choice, int64_t position, int64_t junction, const char* purpose) {
  const int64_t numbers[4] = {seed, choice, position, junction};
  uint64_t words[16] = {};
  std::memcpy(words, numbers, sizeof numbers);
  words[4] = word_of(purpose);
  return of_53_bits(blake2b_8(words, kKeyLength));
}

// The same of R rows with keys [R, 2] of seed and choice, and positions; out [2, N, room], for tokens behind each of N
// blocks and for routing there. Rows fill the lanes; where they are few, blocks do too.
inline void uniforms(const int64_t* keys, const int64_t* positions, int64_t num_rows, int64_t num_blocks, double* out,
                     int64_t room) {
  const uint64_t purposes[2] = {word_of("token"), word_of("route")};
  const int64_t total = 2 * num_blocks * num_rows;
  int64_t row = 0, block = 0, purpose = 0;
  for (int64_t first = 0; first < total; first += kKeys) {
    const int64_t count = std::min(kKeys, total - first);
    Keys words[16] = {};
    double* places[kKeys];
    for (int64_t lane = 0; lane < count; ++lane) {
      words[0][lane] = static_cast<uint64_t>(keys[2 * row]);
      words[1][lane] = static_cast<uint64_t>(keys[2 * row + 1]);
      words[2][lane] = static_cast<uint64_t>(positions[row]);
      words[3][lane] = static_cast<uint64_t>(block);
      words[4][lane] = purposes[purpose];
      places[lane] = out + row;
      if (++row < num_rows) continue;
      row = 0, out += room;
      if (++block == num_blocks) block = 0, ++purpose;
    }
    const Keys hash = blake2b_8(words, kKeyLength);
    for (int64_t lane = 0; lane < count; ++lane) *places[lane] = of_53_bits(hash[lane]);
  }
}

}  // namespace nvium
