"""Algorithm 1 of the paper, slow and obvious: a full forward pass per token, no cache, no batch, plain Python floats.

What the engine must equal, token for token and exit for exit. Shares no code with the engine's sampler.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nvium_core.model.exits import EXIT
from nvium_core.model.llama import causal_attention
from nvium_core.model.nvium import NviumForCausalLM

Uniform = Callable[[int, int, bytes], float]
"""(position of the row that may speak, 0-based junction, b"route" or b"token") → a number in [0, 1)."""

CERTAINTY_MARGIN = 1e-9


@dataclass(frozen=True)
class Spoken:
    """A token, the exit it left at (from 1) and the probability p_k of that exit."""

    token_id: int
    exit: int
    exit_probability: float


def sample(
    model: NviumForCausalLM,
    prompt: Sequence[int],
    max_tokens: int,
    uniform: Uniform,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    stop_token_ids: Collection[int] = (),
) -> list[Spoken]:
    """Continue a prompt by at most `max_tokens` tokens; a stop token is the last one."""
    token_ids, spoken = list(prompt), list[Spoken]()
    while len(spoken) < max_tokens:
        if temperature == 0:
            spoken.append(most_probable(model, token_ids))
        else:
            spoken.append(speak(model, token_ids, uniform, temperature, top_k, top_p))
        token_ids.append(spoken[-1].token_id)
        if spoken[-1].token_id in stop_token_ids:
            break
    return spoken


def speak(
    model: NviumForCausalLM, token_ids: Sequence[int], uniform: Uniform, temperature: float, top_k: int, top_p: float
) -> Spoken:
    """For k = 1 … N: with probability w_k leave here and draw from f(π_k), else go on."""
    position, reached = len(token_ids) - 1, 1.0
    for junction, (w, logits) in enumerate(exits_at_the_end(model, token_ids)):
        if uniform(position, junction, b"route") < w:
            weights = truncated(logits, temperature, top_k, top_p)
            token = invert(weights, uniform(position, junction, b"token"))
            return Spoken(token, junction + 1, reached * w)
        reached *= 1 - w
    raise AssertionError("the last exit always speaks")


def most_probable(model: NviumForCausalLM, token_ids: Sequence[int]) -> Spoken:
    """Temperature 0: the argmax of π_mix, leaving at the first exit after which nothing can change it.

    With m_k = Σ_{j≤k} p_j π_j and r_k the mass not yet spent, that is once top1(m_k) − top2(m_k) > r_k.
    """
    mixture = [0.0] * model.config.vocab_size
    reached = 1.0
    for junction, (w, logits) in enumerate(exits_at_the_end(model, token_ids)):
        probs = truncated(logits, 1.0, 0, 1.0)
        total = sum(probs)
        mixture = [m + reached * w * p / total for m, p in zip(mixture, probs, strict=True)]
        exit_probability, reached = reached * w, reached * (1 - w)
        first, second = sorted(mixture, reverse=True)[:2]
        if first - second > reached + CERTAINTY_MARGIN or junction == model.config.num_exits - 1:
            return Spoken(mixture.index(first), junction + 1, exit_probability)
    raise AssertionError("the last exit always speaks")


@torch.no_grad()
def exits_at_the_end(model: NviumForCausalLM, token_ids: Sequence[int]) -> list[tuple[float, list[float]]]:
    """Each exit's w_k and logits behind the last token, from a forward pass over all of them."""
    ids_BT = torch.tensor([token_ids], device=model.device)
    states = model.hidden_states(ids_BT, torch.arange(len(token_ids), device=model.device)[None], causal_attention())
    log_w_BTE2, outputs = model.exit_outputs(states)
    logits: list[Tensor] = [model.lm_head(o_BTD[0, -1]).double() for o_BTD in outputs]
    w_E = log_w_BTE2[0, -1, :, EXIT].double().exp()
    return [(float(w), row.tolist()) for w, row in zip(w_E, logits, strict=True)]


def truncated(logits: Sequence[float], temperature: float, top_k: int, top_p: float) -> list[float]:
    """f, not normalised: temperature, the k most probable, then the fewest of those that hold top-p of their mass."""
    peak = max(logits)
    weights = [math.exp((logit - peak) / temperature) for logit in logits]
    ranked = sorted(range(len(weights)), key=lambda token: (-weights[token], token))
    if top_k:
        ranked = ranked[:top_k]
    wanted = top_p * sum(weights[token] for token in ranked)
    kept, mass = set[int](), 0.0
    for token in ranked:
        if kept and top_p < 1 and mass >= wanted:
            break
        kept.add(token)
        mass += weights[token]
    return [weight if token in kept else 0.0 for token, weight in enumerate(weights)]


def invert(weights: Sequence[float], uniform: float) -> int:
    """The first token whose cumulative weight exceeds uniform · total."""
    threshold, cumulative = uniform * sum(weights), 0.0
    for token, weight in enumerate(weights):
        cumulative += weight
        if cumulative > threshold:
            return token
    return max(token for token, weight in enumerate(weights) if weight > 0)
