"""Statistics of generated text: probability, entropy, repetition, and exit frequencies compared with p_k.

Shapes: T tokens, E exits, V vocabulary.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import fmean, stdev

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from nvium_core.engine.params import SamplingParams
from nvium_core.model import mixture
from nvium_core.model.nvium import Nvium

GRAM_WORDS = 4
WORD = re.compile(r"[a-z']+")


@dataclass(frozen=True)
class Continuation:
    """A prompt, its continuation, and the continuation's exits (from 1), empty for human text."""

    prompt: list[int]
    token_ids: list[int]
    exits: list[int]


@dataclass(frozen=True, kw_only=True)
class Quality:
    """Means over texts of one sampling setting.

    `mean_logprob` is log π_mix of the tokens at temperature 1, `mean_logprob_error` its standard error over texts.
    `entropy` is the entropy of the sampled distributions in nats. `repeated_grams` is the share of a text's 4-grams of
    words that occur earlier in the text, and `distinct_words` the share of distinct words.
    """

    mean_logprob: float
    mean_logprob_error: float | None
    entropy: float
    repeated_grams: float
    distinct_words: float


@dataclass(frozen=True, kw_only=True)
class ExitFrequencies:
    """Exit frequencies and mean p_k. `deviation` is their largest difference, in standard deviations of chance."""

    exit_shares: list[float]
    expected_exit_shares: list[float]
    deviation: float
    mean_depth: float


@dataclass(frozen=True)
class Judgement:
    """For a text's tokens: log π_mix [T], the entropy of the sampled distributions [T], and p_k [T, E]."""

    logprobs: Tensor
    entropies: Tensor
    exit_probs: Tensor


def quality(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[Continuation], judgements: Sequence[Judgement]
) -> Quality:
    logprobs = [float(judgement.logprobs.mean()) for judgement in judgements]
    words = [WORD.findall(str(tokenizer.decode(text.token_ids)).lower()) for text in texts]
    return Quality(
        mean_logprob=fmean(logprobs),
        mean_logprob_error=stdev(logprobs) / math.sqrt(len(texts)) if len(texts) > 1 else None,
        entropy=fmean(float(judgement.entropies.mean()) for judgement in judgements),
        repeated_grams=fmean(map(repeated_grams, words)),
        distinct_words=fmean(map(distinct_words, words)),
    )


def exit_frequencies(
    exit_layers: Sequence[int], texts: Sequence[Continuation], judgements: Sequence[Judgement]
) -> ExitFrequencies:
    """Compare exit counts with p_k. Given p_k, exits are independent, so a count has the variance Σ p_k (1 − p_k)."""
    p_TE = torch.cat([judgement.exit_probs for judgement in judgements])
    exit_T = torch.tensor(list(chain.from_iterable(text.exits for text in texts))) - 1
    counts_E = exit_T.bincount(minlength=p_TE.shape[1]).double()
    chance_E = (p_TE * (1 - p_TE)).sum(0).sqrt().clamp(min=1e-9)
    depths_E = torch.tensor(exit_layers, dtype=torch.float64) / exit_layers[-1]
    return ExitFrequencies(
        exit_shares=(counts_E / len(exit_T)).tolist(),
        expected_exit_shares=p_TE.mean(0).tolist(),
        deviation=float(((counts_E - p_TE.sum(0)).abs() / chance_E).max()) if len(exit_layers) > 1 else 0.0,
        mean_depth=float((counts_E * depths_E).sum()) / len(exit_T),
    )


@torch.inference_mode()
def judge(model: Nvium, text: Continuation, params: SamplingParams) -> Judgement:
    """Evaluate every token after the prompt in one forward pass."""
    ids = [*text.prompt, *text.token_ids]
    out = model(torch.tensor([ids[:-1]], device=model.device), output_exit_logits=True)
    p_TE, exit_logits_TEV = (x[0, len(text.prompt) - 1 :].double() for x in (out.exit_probs, out.exit_logits))
    log_mixture_TV = mixture.log_mixture(p_TE.log(), exit_logits_TEV)
    targets_T1 = torch.tensor(text.token_ids, device=model.device)[:, None]
    entropy_T = entropy(sampled_distributions(p_TE, exit_logits_TEV, log_mixture_TV, params))
    return Judgement(log_mixture_TV.gather(-1, targets_T1)[:, 0].cpu(), entropy_T.cpu(), p_TE.cpu())


def sampled_distributions(
    p_TE: Tensor, exit_logits_TEV: Tensor, log_mixture_TV: Tensor, params: SamplingParams
) -> Tensor:
    """Return the sampled distributions [T, V]: Σ p_k f(π_k), or f(π_mix) for `mixture`. f applies the temperature."""
    if params.sampling == "mixture":
        return (log_mixture_TV / params.temperature).softmax(-1)
    return (p_TE[..., None] * (exit_logits_TEV / params.temperature).softmax(-1)).sum(-2)


def entropy(probs_TV: Tensor) -> Tensor:
    """Return the entropy in nats [T]."""
    return -torch.special.xlogy(probs_TV, probs_TV).sum(-1)


def repeated_grams(words: Sequence[str]) -> float:
    """Return the share of 4-grams of words that occur earlier in the text."""
    grams = [tuple(words[i : i + GRAM_WORDS]) for i in range(len(words) - GRAM_WORDS + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def distinct_words(words: Sequence[str]) -> float:
    return len(set(words)) / len(words) if words else 0.0
