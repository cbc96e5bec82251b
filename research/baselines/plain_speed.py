"""Measure time per token without an engine, one sequence at a time, relative to the dense model.

The protocol is the same as in `research.speed.per_token`. Tokens are sampled at temperature 1, and all answers have the
same length. The time per token is an answer's total time, prefill included, divided by its number of tokens.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median
from typing import Protocol

from nvium_core.bench.figures import Figures
from research.baselines.decoding import Generated
from research.speed.per_token import DENSE, TRIALS, pairwise, speed_up_percent, take_turns
from research.speed.prompts import PromptSet

Answers = dict[str, list[Generated]]
"""By category, one answer per prompt and trial."""


class Generate(Protocol):
    """Continues a prompt by exactly `max_tokens` sampled tokens."""

    def __call__(self, prompt_ids: Sequence[int], max_tokens: int, *, rng: random.Random) -> Generated: ...


def measure(
    generators: Mapping[str, Generate], prompt_set: PromptSet, trials: int = TRIALS, show_progress: bool = False
) -> dict[str, Answers]:
    """Warm up, then generate every model's answer to every prompt in every trial."""

    def timed(generate: Generate) -> Callable[[list[int], int], Generated]:
        return lambda prompt, seed: generate(prompt, prompt_set.max_new_tokens, rng=random.Random(seed))

    first = next(iter(prompt_set.prompts.values()))[0]
    for generate in generators.values():
        timed(generate)(first, 0)
    return take_turns(
        {name: timed(generate) for name, generate in generators.items()}, prompt_set, trials, show_progress
    )


def compared_with_dense(ours: Answers, dense: Answers) -> Figures:
    """Return the median time per token by category, and the speed-up: the median ratio, averaged over categories."""
    both = {"ours": ours, DENSE: dense}
    times = {category: {name: median(milliseconds(each[category])) for name, each in both.items()} for category in ours}
    ratios = {category: pairwise(milliseconds(dense[category]), milliseconds(ours[category])) for category in ours}
    return {"milliseconds": times, "speed_up_over": DENSE, **speed_up_percent(ratios)}


def milliseconds(answers: Sequence[Generated]) -> list[float]:
    return [answer.milliseconds_per_token for answer in answers]


def early_share(answers: Answers, num_layers: int) -> float:
    depths = [depth for of_category in answers.values() for each in of_category for depth in each.exit_layers]
    return fmean(depth < num_layers for depth in depths)
