"""Algorithm 1 of the paper, slow and obvious: a full forward pass per token, no cache, no batch, plain Python floats.

What the engine must equal, token for token and exit for exit. Shares no code with the engine's sampler.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nvium_core.choices import Sampling
from nvium_core.model.exits import EXIT
from nvium_core.model.llama import causal_attention
from nvium_core.model.nvium import NviumForCausalLM

Uniform = Callable[[int, int, bytes], float]
"""(position of the row that may speak, 0-based junction, b"route" or b"token") → a number in [0, 1)."""

Rule = Callable[[Sequence[int]], Collection[int]]
"""The tokens that may follow those generated so far; where none may, they are an answer."""

CERTAINTY_MARGIN = 1e-9


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """f, and when to stop: what the engine's sampling parameters of the same names mean."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_tokens: int = 0
    stop_token_ids: Collection[int] = ()
    constraint: Rule | None = None
    sampling: Sampling = "exits"


@dataclass(frozen=True)
class Spoken:
    """A token, the exit it left at (from 1) and the probability p_k of that exit."""

    token_id: int
    exit: int
    exit_probability: float


@dataclass(frozen=True)
class Moment:
    """All that the next token depends on: what came before, what each exit says (w_k and logits), what is wished."""

    prompt: Sequence[int]
    generated: Sequence[int]
    exits: Sequence[tuple[float, Sequence[float]]]
    wishes: Wishes

    @property
    def position(self) -> int:
        return len(self.prompt) + len(self.generated) - 1


def sample(
    model: NviumForCausalLM, prompt: Sequence[int], max_tokens: int, uniform: Uniform, wishes: Wishes | None = None
) -> list[Spoken]:
    """Continue a prompt by at most `max_tokens` tokens; the last one is a stop token, or nothing may follow it."""
    wishes = wishes or Wishes()
    spoken = list[Spoken]()
    while len(spoken) < max_tokens:
        generated = [s.token_id for s in spoken]
        exits = exits_at_the_end(model, [*prompt, *generated])
        spoken.append(speak(Moment(prompt, generated, exits, wishes), uniform))
        if is_last([*generated, spoken[-1].token_id], wishes):
            break
    return spoken


def is_last(generated: Sequence[int], wishes: Wishes) -> bool:
    """Whether the last of the tokens ends the answer, however many are asked for."""
    is_satisfied = wishes.constraint is not None and not wishes.constraint(generated)
    return is_satisfied or generated[-1] in wishes.stop_token_ids


def speak(moment: Moment, uniform: Uniform) -> Spoken:
    """The next token, by whichever of the three definitions is wished."""
    if moment.wishes.sampling == "mixture":
        return speak_for_all(moment, uniform)
    return most_probable(moment) if moment.wishes.temperature == 0 else speak_at_one_exit(moment, uniform)


def speak_at_one_exit(moment: Moment, uniform: Uniform) -> Spoken:
    """For k = 1 … N: with probability w_k leave here and draw from f(π_k), else go on."""
    reached = 1.0
    for junction, (w, logits) in enumerate(moment.exits):
        if uniform(moment.position, junction, b"route") < w:
            weights = truncated(adjusted(logits, moment), moment.wishes)
            token = invert(weights, uniform(moment.position, junction, b"token"))
            return Spoken(token, junction + 1, reached * w)
        reached *= 1 - w
    raise AssertionError("the last exit always speaks")


def speak_for_all(moment: Moment, uniform: Uniform) -> Spoken:
    """`sampling: mixture`: draw from f(π_mix), or take its most probable token, when all exits have been heard."""
    mixture, exit_probability, reached = [0.0] * len(moment.exits[0][1]), 0.0, 1.0
    for w, logits in moment.exits:
        exit_probability, reached = reached * w, reached * (1 - w)
        mixture = [m + exit_probability * p for m, p in zip(mixture, softmax(logits), strict=True)]
    logits = adjusted([math.log(m) if m > 0 else -math.inf for m in mixture], moment)
    if moment.wishes.temperature == 0:
        token = logits.index(max(logits))
    else:
        uniform_number = uniform(moment.position, len(moment.exits) - 1, b"token")
        token = invert(truncated(logits, moment.wishes), uniform_number)
    return Spoken(token, len(moment.exits), exit_probability)


def most_probable(moment: Moment) -> Spoken:
    """Temperature 0: the argmax of Σ p_k g(π_k), leaving at the first exit after which nothing can change it.

    With m_k = Σ_{j≤k} p_j g(π_j) and r_k the mass not yet spent, that is once top1(m_k) − top2(m_k) > r_k.
    """
    mixture, reached = [0.0] * len(moment.exits[0][1]), 1.0
    for junction, (w, logits) in enumerate(moment.exits):
        exit_probability, reached = reached * w, reached * (1 - w)
        probs = softmax(adjusted(logits, moment))
        mixture = [m + exit_probability * p for m, p in zip(mixture, probs, strict=True)]
        first, second = sorted(mixture, reverse=True)[:2]
        if first - second > reached + CERTAINTY_MARGIN or junction == len(moment.exits) - 1:
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


def adjusted(logits: Sequence[float], moment: Moment) -> list[float]:
    """g: repetition penalty, presence and frequency penalties, bias, no end before `min_tokens` tokens, constraint."""
    return [adjusted_logit(token, logit, moment) for token, logit in enumerate(logits)]


def adjusted_logit(token: int, logit: float, moment: Moment) -> float:
    wishes = moment.wishes
    if token in moment.prompt or token in moment.generated:
        logit = logit / wishes.repetition_penalty if logit > 0 else logit * wishes.repetition_penalty
    if token in moment.generated:
        logit -= wishes.presence_penalty + wishes.frequency_penalty * list(moment.generated).count(token)
    if token in wishes.logit_bias:
        logit += wishes.logit_bias[token]
    if token in wishes.stop_token_ids and len(moment.generated) < wishes.min_tokens:
        return -math.inf
    if wishes.constraint is not None and token not in wishes.constraint(moment.generated):
        return -math.inf
    return logit


def truncated(logits: Sequence[float], wishes: Wishes) -> list[float]:
    """What is left of a distribution, not normalised: temperature; tokens of at least min-p times the probability of
    the first; the k most probable; and the fewest of those that hold top-p of their mass."""
    weights = tempered(logits, wishes.temperature)
    ranked = sorted(range(len(weights)), key=lambda token: (-weights[token], token))
    if wishes.min_p:  # compared as logarithms, where tokens less than rounding apart in probability still differ
        below_peak = [(logit - max(logits)) / wishes.temperature for logit in logits]
        ranked = [token for token in ranked if below_peak[token] >= math.log(wishes.min_p)]
    if wishes.top_k:
        ranked = ranked[: wishes.top_k]
    wanted = wishes.top_p * sum(weights[token] for token in ranked)
    kept, mass = set[int](), 0.0
    for token in ranked:
        if kept and wishes.top_p < 1 and mass >= wanted:
            break
        kept.add(token)
        mass += weights[token]
    return [weight if token in kept else 0.0 for token, weight in enumerate(weights)]


def softmax(logits: Sequence[float]) -> list[float]:
    weights = tempered(logits, 1.0)
    total = sum(weights)
    return [weight / total for weight in weights]


def tempered(logits: Sequence[float], temperature: float) -> list[float]:
    """Weights in proportion to the probabilities, 1 for the most probable token."""
    peak = max(logits)
    return [math.exp((logit - peak) / temperature) for logit in logits]


def invert(weights: Sequence[float], uniform: float) -> int:
    """The first token whose cumulative weight exceeds uniform · total."""
    threshold, cumulative = uniform * sum(weights), 0.0
    for token, weight in enumerate(weights):
        cumulative += weight
        if cumulative > threshold:
            return token
    return max(token for token, weight in enumerate(weights) if weight > 0)
