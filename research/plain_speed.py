"""Time per token in plain generation, one sequence at a time, beside the dense model.

`latency`'s protocol without an engine: tokens are sampled at temperature 1, and a token has its share of its answer's
total time, prefill included. Every answer has the same length, end-of-text or not.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median
from typing import Protocol

from nvium_core.bench.harness import Figures
from research.decoding import Generated
from research.speed import DENSE, TRIALS, Questions, pairwise, speed_up_percent, take_turns

Answers = dict[str, list[Generated]]
"""By category, one for every prompt and trial."""


class Generate(Protocol):
    """Continues a prompt with exactly `max_tokens` tokens, sampled with a generator."""

    def __call__(self, prompt_ids: Sequence[int], max_tokens: int, *, rng: random.Random) -> Generated: ...


def measure(
    generators: Mapping[str, Generate], asked: Questions, trials: int = TRIALS, show_progress: bool = False
) -> dict[str, Answers]:
    """Every model's answers to every prompt in every trial, after one warm-up round."""

    def timed(generate: Generate) -> Callable[[list[int], int], Generated]:
        return lambda prompt, seed: generate(prompt, asked.max_new_tokens, rng=random.Random(seed))

    first = next(iter(asked.prompts.values()))[0]
    for generate in generators.values():
        timed(generate)(first, 0)
    return take_turns({name: timed(generate) for name, generate in generators.items()}, asked, trials, show_progress)


def beside_dense(ours: Answers, dense: Answers) -> Figures:
    """Median times per token of each category, and the speed-up: the median of pairs from the same turn, averaged over
    categories."""
    both = {"ours": ours, DENSE: dense}
    times = {category: {name: median(milliseconds(each[category])) for name, each in both.items()} for category in ours}
    ratios = {category: pairwise(milliseconds(dense[category]), milliseconds(ours[category])) for category in ours}
    return {"milliseconds": times, "speed_up_over": DENSE, **speed_up_percent(ratios)}


def milliseconds(answers: Sequence[Generated]) -> list[float]:
    """Per token, of each answer."""
    return [answer.milliseconds_per_token for answer in answers]


def early_share(answers: Answers, num_layers: int) -> float:
    """The share of tokens emitted before the last layer."""
    depths = [depth for of_category in answers.values() for each in of_category for depth in each.exit_layers]
    return fmean(depth < num_layers for depth in depths)
