// A running sequence: its pages, tokens and sampling parameters. seats.py fills it.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>

#include "draw.h"

namespace nvium {

// Changes of one token's logit. Penalties come first, then the bias.
struct Change {
  double token, repetition, occurrence, bias;
};

struct Seat {
  const int64_t* pages;
  int64_t* tokens;  // prompt, answer and drafts; a call appends the tokens that it emits
  int64_t seed, choice;
  Draw draw;
  int64_t num_changes;
  Change* changes;  // the array has room for one more change per token that a call may emit
  double presence, frequency, repetition;  // penalties of emitted tokens
  int64_t num_prompt_tokens;
  int64_t mask_bytes;
  const uint8_t* mask;  // one bit per token, 1 if the token may follow; null if every token may
  int64_t num_stops;
  const int64_t* stops;

  int64_t slot(int64_t position, int64_t page_size) const {
    return pages[position / page_size] * page_size + position % page_size;
  }

  bool stops_at(int64_t token) const {
    for (int64_t i = 0; i < num_stops; ++i)
      if (stops[i] == token) return true;
    return false;
  }

  bool changes_logits() const { return num_changes || mask; }

  // Return the only token that the mask allows, or kNoToken if the mask allows several tokens or none.
  int64_t only_token(int64_t vocab_size) const {
    int64_t only = kNoToken;
    for (int64_t byte = 0; mask && byte < std::min(mask_bytes, (vocab_size + 7) / 8); ++byte) {
      if (!mask[byte]) continue;
      const int64_t token = 8 * byte + std::countr_zero(mask[byte]);
      if (only != kNoToken || mask[byte] & (mask[byte] - 1)) return kNoToken;
      only = token < vocab_size ? token : kNoToken;
    }
    return only;
  }

  // Apply penalties, biases and the mask to logits.
  void change(double* logits, int64_t vocab_size) const {
    for (int64_t i = 0; i < num_changes; ++i) {
      const auto& [token, repetition, occurrence, bias] = changes[i];
      double& x = logits[static_cast<int64_t>(token)];
      x = (x > 0 ? x / repetition : x * repetition) - occurrence + bias;
    }
    for (int64_t first = 0; mask && first < vocab_size; first += 8) {
      const uint8_t allowed = first < 8 * mask_bytes ? mask[first / 8] : 0;
      if (allowed == 0xFF) continue;
      for (int64_t token = first; token < std::min(first + 8, vocab_size); ++token)
        if (!(allowed >> (token - first) & 1)) logits[token] = -std::numeric_limits<double>::infinity();
    }
  }

  // Append an emitted token and update its penalties. The reference is nvium_core/engine/schedule/logit_changes.py.
  void append(int64_t token, int64_t num_tokens) {
    tokens[num_tokens] = token;
    if (!presence && !frequency && repetition == 1) return;
    Change* const end = changes + num_changes;
    Change* const own = std::find_if(changes, end, [&](const Change& each) { return each.token == token; });
    if (own == end) *own = {static_cast<double>(token), 1, 0, 0}, ++num_changes;
    const auto count = std::count(tokens + num_prompt_tokens, tokens + num_tokens + 1, token);
    const volatile double of_count = frequency * count;  // no fused multiply-add: it rounds unlike Python
    own->repetition = repetition, own->occurrence = presence + of_count;
  }
};

}  // namespace nvium
