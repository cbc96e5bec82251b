// The structs that Python fills, as library.py reads them here.
//
// Shapes: N blocks and exits, L layer calls, S cache slots, D width, H query heads, G key heads, P head size, V vocabulary.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>

#include "draw.h"
#include "matrix.h"

namespace nvium {

// Biases of heads are [H * P] or [G * P], norms of heads are [P] or like the biases, and other norms are [D]. Biases and
// norms are null if the layer has none; so is the gate.
template <typename A> struct Layer {
  const A *attention_norm, *attention_post_norm;
  Matrix q, k, v, o;
  const A *q_bias, *k_bias, *v_bias, *q_norm, *k_norm;
  const A *mlp_norm, *mlp_post_norm;
  Matrix gate, up, down;
};

// In the order of `QKNorm` and `Activation` in nvium_core/choices.py.
enum QKNorm : int64_t { kNoNorm = -1, kHeadNorm, kWidthNorm, kRotatedHeadNorm };
enum Activation : int64_t { kSilu, kGeluTanh, kRelu2 };

// `LayerCall` in nvium_core/model/plan.py. rotary -1, window 0, cap 0: none. scale 0: 1 / √P.
struct LayerCall {
  int64_t layer, cache, rotary, window, qk_norm, activation, is_normed;
  double scale, cap;
};

// Weights of norm, router and adapter are null if an exit has none. A linear gate is a router_head [2, D] with a first row 0.
template <typename A> struct Exit {
  const A* norm;
  Matrix fc1;
  const A* fc1_bias;
  Matrix fc2;
  const A *fc2_bias, *router_norm;
  Matrix router_head;
  const A* router_bias;
  Matrix up, down, head;
};

// Pages of keys [pages, L, G, P, page size] and values [pages, L, G, page size, P]. So a sequence uses as much memory as its
// pages need, and a page's keys are vectors. kind: the `Stored` type of the numbers. num_heads: key heads.
struct Cache {
  int64_t kind, page_size, num_slots, num_calls, num_heads, head_size;
  void *keys, *values;
};

template <typename T> struct Model {
  int64_t num_threads, num_blocks, width, inner_width, num_heads, router_width, adapter_width, vocab_size;
  double eps, temperature, embedding_scale, residual_scale, logit_scale, logit_cap;  // logit_cap 0: none
  const int64_t* first_calls;  // [N + 1]: the first call of each block, then L
  const LayerCall* calls;      // [L]
  const Accumulator<T>* norm;  // [D]: follows calls that are normed
  const Layer<Accumulator<T>>* layers;
  const Exit<Accumulator<T>>* exits;
  Cache cache;
  int64_t context, rotary_size;
  const Accumulator<T> *cos, *sin;   // [rotary tables, context, rotary_size]
  T* states;                         // [N, S, D]: the output of each block
  int64_t embedding_kind;            // `Stored`
  const char* embedding;             // [V, D], as stored

  int64_t last() const { return num_blocks - 1; }

  T* state(int64_t block, int64_t slot) const { return states + (block * cache.num_slots + slot) * width; }
};

// Changes of one token's logit. Penalties come first, then the bias.
struct Change {
  double token, repetition, occurrence, bias;
};

// A running sequence: its pages, tokens and sampling parameters. backend.py fills it.
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
      const uint8_t allowed = mask[byte] & ((1 << std::min(vocab_size - 8 * byte, int64_t{8})) - 1);
      if (!allowed) continue;
      if (only != kNoToken || allowed & (allowed - 1)) return kNoToken;
      only = 8 * byte + std::countr_zero(allowed);
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

  // Append an emitted token and update its penalties. The reference is nvium_core/engine/schedule/sequence.py.
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

// A token, the block whose exit emitted it, and log p_k of this exit.
struct Emission {
  int64_t token, block;
  double log_p;
};

// `Run` in nvium_core/engine/schedule/step.py: rows filled[k] … stop - 1 of each block k. The front is the last token's row.
struct Run {
  int64_t seat, stop, num_tokens;
  int64_t limit;           // emit at most this many tokens
  int64_t first_verified;  // kOriginal: the last exit draws the next token of this row and of later rows
  int64_t first_scored;    // first row to score
  int64_t is_scored_at_exit;  // 1: score an emitted row at its exit; 0: score rows that have passed the last block
  int64_t* filled;         // [N]
  double log_reached;      // log Π (1 − w_j) over the exits that the front has passed
  int64_t num_emitted, num_scored;
  Emission* emissions;
};

struct BlockReport {
  int64_t num_passes, num_rows;
  double seconds;
};

struct Call {
  int64_t first, stop;  // run blocks first … stop - 1
  int64_t is_one_pass;  // 1: fronts emit after the last block; 0: after every block, which ends their runs
  int64_t is_tied;      // 1: one pass, in which each row passes at most one block
  int64_t num_runs;
  Run* runs;
  Seat* seats;
  int64_t max_rows;  // if not one pass, stop before a block with more rows, except before the first block
  double seconds;    // time budget: after this time, start no further token
  int64_t min_tiled_rows;  // passes of at least this many rows use AMX tiles
  int64_t num_top;       // the most probable tokens to return with each score
  double* scores;        // [rows, 1 + N + 2 · num_top]: log-probability of the next token, p_k, log-probabilities, tokens
  BlockReport* reports;  // [N]
  double router_seconds, head_seconds;
};

}  // namespace nvium
