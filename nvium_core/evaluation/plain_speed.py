"""Time per token in plain generation, one sequence at a time: ways of speaking beside the dense model.

The protocol is that of `latency`, without an engine: all take turns at every prompt, every other time in reverse order,
tokens are drawn at temperature 1, and a token has its share of its answer's whole time, prompt included. Every answer
has the same length, end-of-text or not.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from statistics import fmean, median
from typing import Protocol

from rich.progress import track
from transformers import PreTrainedTokenizerBase

from nvium_core.bench.harness import Figures
from nvium_core.evaluation.latency import DENSE, MAX_NEW_TOKENS, TRIALS
from nvium_core.evaluation.ratios import pairwise, speed_up_percent
from nvium_core.evaluation.spec_bench import Prompts
from nvium_core.training.baselines.decoding import Generated

Answers = dict[str, list[Generated]]
"""By category, one for every prompt and trial."""


class Speak(Protocol):
    """How a model goes on: with exactly `max_tokens` tokens, drawn with a generator."""

    def __call__(self, prompt_ids: Sequence[int], max_tokens: int, *, rng: random.Random) -> Generated: ...


@dataclass(frozen=True, kw_only=True)
class Questions:
    """Prompts by category as tokens, how long the answers are, and how many prompts have lost their beginning."""

    prompts: dict[str, list[list[int]]]
    max_new_tokens: int
    prompts_cut: int


def questions(tokenizer: PreTrainedTokenizerBase, prompts: Prompts, context: int) -> Questions:
    """Answers take at most half of the context; prompts that leave no room for them lose their beginning."""
    num_tokens = min(MAX_NEW_TOKENS, context // 2)
    room = context - num_tokens
    whole = {category: [tokens(tokenizer, text) for text in texts] for category, texts in prompts.items()}
    return Questions(
        prompts={category: [ids[-room:] for ids in of_category] for category, of_category in whole.items()},
        max_new_tokens=num_tokens,
        prompts_cut=sum(len(ids) > room for of_category in whole.values() for ids in of_category),
    )


def tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """At least one: end-of-text where there is no text."""
    return list(tokenizer(text, verbose=False).input_ids) or [tokenizer.eos_token_id]


def measure(
    speakers: Mapping[str, Speak], asked: Questions, trials: int = TRIALS, show_progress: bool = False
) -> dict[str, Answers]:
    """What each speaker answers to every prompt in every trial, after one round that does not count."""
    answers: dict[str, Answers] = {name: {category: [] for category in asked.prompts} for name in speakers}
    once = [(category, prompt) for category, of_category in asked.prompts.items() for prompt in of_category]
    turns = cycle((list(speakers), list(speakers)[::-1]))
    for speak in speakers.values():
        speak(once[0][1], asked.max_new_tokens, rng=random.Random(0))
    rounds = list(enumerate(once * trials))
    for seed, (category, prompt) in track(rounds, "speaking", transient=True, disable=not show_progress):
        for name in next(turns):
            said = speakers[name](prompt, asked.max_new_tokens, rng=random.Random(seed))
            answers[name][category].append(said)
    return answers


def beside_dense(ours: Answers, dense: Answers) -> Figures:
    """Median times per token of each category, and the speed-up: the median of pairs, each spoken in turn, on average
    over categories."""
    both = {"ours": ours, DENSE: dense}
    times = {category: {name: median(milliseconds(each[category])) for name, each in both.items()} for category in ours}
    ratios = {category: pairwise(milliseconds(dense[category]), milliseconds(ours[category])) for category in ours}
    return {"milliseconds": times, "speed_up_over": DENSE, **speed_up_percent(ratios)}


def milliseconds(answers: Sequence[Generated]) -> list[float]:
    """Per token, of each answer."""
    return [answer.milliseconds_per_token for answer in answers]


def early_share(answers: Answers, num_layers: int) -> float:
    """The share of tokens that were said before the last layer."""
    depths = [depth for of_category in answers.values() for each in of_category for depth in each.exit_layers]
    return fmean(depth < num_layers for depth in depths)
