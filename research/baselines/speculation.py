"""LayerSkip's self-speculative decoding: an early exit drafts, the remaining layers verify. Both share a cache.

The layers above the early exit process all drafted rows at once. Greedy output has the same tokens as the last exit
alone. Sampled output has the same distribution.

Shapes: K drafted tokens, R = K + 1 rows, D width, V vocabulary.
"""

import random
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from nvium_core.model.nvium import Nvium
from research.baselines.decoding import Decoding, Generated, choose, draw, head_logits


@torch.inference_mode()
def generate(
    model: Nvium,
    prompt_ids: Sequence[int],
    max_tokens: int,
    *,
    exit_layer: int,
    draft_length: int,
    rng: random.Random | None = None,
) -> Generated:
    """Generate exactly `max_tokens` tokens, drafting `draft_length` at a time after `exit_layer` layers.

    Tokens are sampled if `rng` is given, else greedy. In the result, `exit_layers` is `exit_layer` for accepted drafts.
    Raise `ValueError` if the early exit is invalid or the tokens do not fit into the context.
    """
    depth = model.config.num_hidden_layers
    if not (0 < exit_layer < depth and draft_length >= 1):
        raise ValueError(f"cannot draft {draft_length} tokens after layer {exit_layer} of {depth}")
    started = time.perf_counter()
    decoding, exit_layers = Decoding(model, prompt_ids, max_tokens), list[int]()
    decoding.read_prompt()
    while len(exit_layers) < max_tokens:
        num_drafts = min(draft_length, max_tokens - len(exit_layers) - 1)
        token_ids = draft_and_verify(decoding, exit_layer, num_drafts, rng)
        decoding.token_ids += token_ids
        exit_layers += [exit_layer] * (len(token_ids) - 1) + [depth]
    return Generated(decoding.token_ids[len(prompt_ids) :], exit_layers, time.perf_counter() - started)


def draft_and_verify(decoding: Decoding, exit_layer: int, num_drafts: int, rng: random.Random | None) -> list[int]:
    """Draft tokens. Return the accepted drafts and one more token from the last exit."""
    model, front = decoding.model, decoding.front
    drafts, draft_logits, states = list[int](), list[Tensor](), list[Tensor]()
    for number in range(num_drafts + 1):
        newest = decoding.embed([*decoding.token_ids[-1:], *drafts][-1:])
        states.append(decoding.run(newest, range(exit_layer), front + number))
        if number < num_drafts:
            draft_logits.append(head_logits(model, -1, states[-1][0]))
            drafts.append(choose(draft_logits[-1], rng))
    h_RD = decoding.run(torch.cat(states), range(exit_layer, model.config.num_hidden_layers), front)
    logits_RV = head_logits(model, -1, h_RD)
    if rng is None:
        return agreed(drafts, logits_RV.argmax(-1).tolist())
    draft_probs = [logits_V.softmax(-1) for logits_V in draft_logits]
    return accepted(drafts, draft_probs, list(logits_RV.softmax(-1)), rng)


def agreed(drafts: Sequence[int], best: Sequence[int]) -> list[int]:
    """Return the last exit's tokens up to and including the first that differs from the draft."""
    num_agreed = next((i for i, draft in enumerate(drafts) if draft != best[i]), len(drafts))
    return list(best[: num_agreed + 1])


def accepted(
    drafts: Sequence[int], draft_probs: Sequence[Tensor], probs: Sequence[Tensor], rng: random.Random
) -> list[int]:
    """Return tokens distributed as `probs`, by speculative sampling (Leviathan et al., arXiv 2211.17192).

    Let p be the last exit's distribution (`probs`) and q the draft's (`draft_probs`). Accept a draft x with probability
    min(1, p(x) / q(x)). Replace the first rejected draft by a sample from max(0, p − q), normalised.
    """
    for number, (draft, q_V, p_V) in enumerate(zip(drafts, draft_probs, probs, strict=False)):
        if rng.random() * float(q_V[draft]) >= float(p_V[draft]):
            rest_V = (p_V - q_V).clamp(min=0)
            return [*drafts[:number], draw(rest_V if rest_V.any() else p_V, rng)]  # p − q may round to zero
    return [*drafts, draw(probs[-1], rng)]
