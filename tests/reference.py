"""Algorithm 1 of the paper, slow and obvious: a full forward pass per token, no cache, no batch, plain Python floats.

The engine must produce the same tokens and exits. This module shares no code with the engine's sampler.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nvium_core import SamplingParams
from nvium_core.model.exits import EXIT
from nvium_core.model.llama import causal_attention
from nvium_core.model.nvium import Nvium

Uniform = Callable[[int, int, bytes], float]
"""(position of the last token, 0-based exit, b"route" or b"token") → a number in [0, 1)."""

PURPOSES = b"token", b"route"

CERTAINTY_MARGIN = 1e-9


@dataclass(frozen=True)
class Sampled:
    """A token, its exit (1-based) and the probability p_k of that exit."""

    token_id: int
    exit: int
    exit_probability: float


@dataclass(frozen=True)
class State:
    """The state that the next token depends on. `exits` are w_k and the logits of each exit.

    A constraint's `rule` returns the tokens allowed after those generated; an empty set ends the sequence.
    """

    prompt: Sequence[int]
    generated: Sequence[int]
    exits: Sequence[tuple[float, Sequence[float]]]
    params: SamplingParams

    @property
    def position(self) -> int:
        return len(self.prompt) + len(self.generated) - 1


def uniform(seed: int, choice: int, position: int, exit_: int, purpose: bytes) -> float:
    """Return the random number for routing or for drawing a token at a 0-based exit, after this position."""
    stream = np.random.Philox(counter=[position, exit_, 0, 0], key=np.array([seed % 2**64, choice], np.uint64))
    return float(np.random.Generator(stream).random(4)[PURPOSES.index(purpose)])


def sample(model: Nvium, prompt: Sequence[int], uniform: Uniform, params: SamplingParams) -> list[Sampled]:
    """Generate up to `max_tokens` tokens, a stop token, or until the constraint allows no token."""
    sampled = list[Sampled]()
    while len(sampled) < params.max_tokens:
        generated = [s.token_id for s in sampled]
        exits = last_exits(model, [*prompt, *generated])
        sampled.append(next_token(State(prompt, generated, exits, params), uniform))
        if ends([*generated, sampled[-1].token_id], params):
            break
    return sampled


def ends(generated: Sequence[int], params: SamplingParams) -> bool:
    """Return whether the last token ends the sequence before `max_tokens`."""
    is_satisfied = params.constraint is not None and not params.constraint.rule(generated)
    return is_satisfied or generated[-1] in params.stop_token_ids


def next_token(state: State, uniform: Uniform) -> Sampled:
    """Sample the next token according to `params.sampling`."""
    if state.params.sampling == "original":
        return sample_from_original(state, uniform)
    if state.params.sampling == "mixture":
        return sample_from_mixture(state, uniform)
    if state.params.sampling in ("threshold", "confidence"):
        return sample_beyond_threshold(state, uniform)
    return greedy(state) if state.params.temperature == 0 else sample_from_exits(state, uniform)


def sample_from_exits(state: State, uniform: Uniform) -> Sampled:
    """For k = 1 … N: with probability w_k, exit and sample from f(π_k), else continue."""
    reached = 1.0
    for junction, (w, logits) in enumerate(state.exits):
        if uniform(state.position, junction, b"route") < w:
            weights = truncated(adjusted(logits, state), state.params)
            token = invert(weights, uniform(state.position, junction, b"token"))
            return Sampled(token, junction + 1, reached * w)
        reached *= 1 - w
    raise AssertionError("w is 1 at the last exit")


def sample_beyond_threshold(state: State, uniform: Uniform) -> Sampled:
    """`sampling: threshold`: exit at the first k with 1 − Π_{j≤k} (1 − w_j) ≥ threshold; 1 or more is the last exit.

    CALM's rule, `confidence`, exits at the first k where the largest probability of π_k is above the threshold.
    """
    remaining, threshold = 1.0, state.params.threshold or 0.0
    for junction, (w, logits) in enumerate(state.exits):
        p, remaining = remaining * w, remaining * (1 - w)
        by_threshold = state.params.sampling == "threshold"
        stops = 1 - remaining >= threshold if by_threshold else max(softmax(logits)) > threshold
        if (stops and threshold < 1) or junction == len(state.exits) - 1:
            changed = adjusted(logits, state)
            if state.params.temperature == 0:
                return Sampled(changed.index(max(changed)), junction + 1, p)
            token = invert(truncated(changed, state.params), uniform(state.position, junction, b"token"))
            return Sampled(token, junction + 1, p)
    raise AssertionError("the loop returns at the last exit")


def sample_from_mixture(state: State, uniform: Uniform) -> Sampled:
    """`sampling: mixture`: sample from f(π_mix), or take its argmax at temperature 0."""
    mixture, exit_probability, reached = [0.0] * len(state.exits[0][1]), 0.0, 1.0
    for w, logits in state.exits:
        exit_probability, reached = reached * w, reached * (1 - w)
        mixture = [m + exit_probability * p for m, p in zip(mixture, softmax(logits), strict=True)]
    logits = adjusted([math.log(m) if m > 0 else -math.inf for m in mixture], state)
    if state.params.temperature == 0:
        token = logits.index(max(logits))
    else:
        uniform_number = uniform(state.position, len(state.exits) - 1, b"token")
        token = invert(truncated(logits, state.params), uniform_number)
    return Sampled(token, len(state.exits), exit_probability)


def sample_from_original(state: State, uniform: Uniform) -> Sampled:
    """`sampling: original`: sample from f(π_N), or take its argmax. Drafting must not change the result."""
    last = len(state.exits) - 1
    logits = adjusted(state.exits[last][1], state)
    if state.params.temperature == 0:
        return Sampled(logits.index(max(logits)), last + 1, 1.0)
    weights = truncated(logits, state.params)
    return Sampled(first_of_race(weights, uniform(state.position, 0, b"token")), last + 1, 1.0)


def first_of_race(weights: Sequence[float], uniform: float) -> int:
    """Return the token with the smallest E / weight, with E exponential, derived from the uniform and the token."""
    times = [-math.log(split_mix(uniform, token)) / weight for token, weight in enumerate(weights) if weight > 0]
    return [token for token, weight in enumerate(weights) if weight > 0][times.index(min(times))]


def split_mix(uniform: float, token: int) -> float:
    """Return SplitMix64's number at index `token`, in (0, 1), seeded with the 53 bits of `uniform`."""
    x = (int(uniform * 2**53) + (token + 1) * 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return (((x ^ x >> 31) >> 12) + 0.5) / 2**52


def greedy(state: State) -> Sampled:
    """Temperature 0: the argmax of Σ p_k g(π_k), at the first exit after which it is certain.

    With m_k = Σ_{j≤k} p_j g(π_j) and the remaining mass r_k, it is certain once top1(m_k) − top2(m_k) > r_k.
    """
    mixture, reached = [0.0] * len(state.exits[0][1]), 1.0
    for junction, (w, logits) in enumerate(state.exits):
        exit_probability, reached = reached * w, reached * (1 - w)
        probs = softmax(adjusted(logits, state))
        mixture = [m + exit_probability * p for m, p in zip(mixture, probs, strict=True)]
        first, second = sorted(mixture, reverse=True)[:2]
        if first - second > reached + CERTAINTY_MARGIN or junction == len(state.exits) - 1:
            return Sampled(mixture.index(first), junction + 1, exit_probability)
    raise AssertionError("the loop returns at the last exit")


@torch.no_grad()
def last_exits(model: Nvium, token_ids: Sequence[int]) -> list[tuple[float, list[float]]]:
    """Compute w_k and logits of each exit at the last position, by a forward pass over all tokens."""
    ids_BT = torch.tensor([token_ids], device=model.device)
    states = model.hidden_states(ids_BT, torch.arange(len(token_ids), device=model.device)[None], causal_attention())
    log_w_BTE2, outputs = model.exit_outputs(states)
    logits: list[Tensor] = [model.lm_head(o_BTD[0, -1]).double() for o_BTD in outputs]
    w_E = log_w_BTE2[0, -1, :, EXIT].double().exp()
    return [(float(w), row.tolist()) for w, row in zip(w_E, logits, strict=True)]


def adjusted(logits: Sequence[float], state: State) -> list[float]:
    """g: repetition, presence and frequency penalties, logit bias, `min_tokens`, constraint."""
    return [adjusted_logit(token, logit, state) for token, logit in enumerate(logits)]


def adjusted_logit(token: int, logit: float, state: State) -> float:
    params = state.params
    if token in state.prompt or token in state.generated:
        logit = logit / params.repetition_penalty if logit > 0 else logit * params.repetition_penalty
    if token in state.generated:
        logit -= params.presence_penalty + params.frequency_penalty * list(state.generated).count(token)
    if token in params.logit_bias:
        logit += params.logit_bias[token]
    if token in params.stop_token_ids and len(state.generated) < params.min_tokens:
        return -math.inf
    if params.constraint is not None and token not in params.constraint.rule(state.generated):
        return -math.inf
    return logit


def truncated(logits: Sequence[float], params: SamplingParams) -> list[float]:
    """Apply temperature, min-p, top-k and top-p, in this order. The result is not normalised."""
    weights = tempered(logits, params.temperature)
    ranked = sorted(range(len(weights)), key=lambda token: (-weights[token], token))
    if params.min_p:  # compared in log space: probabilities may round to the same number
        below_peak = [(logit - max(logits)) / params.temperature for logit in logits]
        ranked = [token for token in ranked if below_peak[token] >= math.log(params.min_p)]
    if params.top_k:
        ranked = ranked[: params.top_k]
    wanted = params.top_p * sum(weights[token] for token in ranked)
    kept, mass = set[int](), 0.0
    for token in ranked:
        if kept and params.top_p < 1 and mass >= wanted:
            break
        kept.add(token)
        mass += weights[token]
    return [weight if token in kept else 0.0 for token, weight in enumerate(weights)]


def softmax(logits: Sequence[float]) -> list[float]:
    weights = tempered(logits, 1.0)
    total = sum(weights)
    return [weight / total for weight in weights]


def tempered(logits: Sequence[float], temperature: float) -> list[float]:
    """Return unnormalised probabilities; the most probable token has 1."""
    peak = max(logits)
    return [math.exp((logit - peak) / temperature) for logit in logits]


def invert(weights: Sequence[float], uniform: float) -> int:
    """Return the first token whose cumulative weight exceeds uniform · total."""
    threshold, cumulative = uniform * sum(weights), 0.0
    for token, weight in enumerate(weights):
        cumulative += weight
        if cumulative > threshold:
            return token
    return max(token for token, weight in enumerate(weights) if weight > 0)
