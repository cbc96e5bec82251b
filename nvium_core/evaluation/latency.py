"""Milliseconds per token by category of prompt: a model, the same model at full depth, and its dense twin.

The paper's protocol: one request at a time, 128 new tokens, three trials; a token's share of the whole time, prompt
included; the mean over categories of dense over ours. Every answer has the same length, end-of-text or not. Contenders
take turns at every prompt, every other time in reverse order. A category's time is the median over its answers and its
ratio the median over pairs that were spoken in turn, so that a noisy machine is fair to all.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import cycle
from statistics import fmean, median
from typing import Any

import numpy as np
from rich.progress import track

from nvium_core.choices import Schedule
from nvium_core.engine.engine import Engine
from nvium_core.engine.params import EngineConfig, SamplingParams
from nvium_core.evaluation.ratios import Ratios, mean_ratio, pairwise, ratio_interval
from nvium_core.evaluation.spec_bench import Prompts
from nvium_core.evaluation.spoken import SpokenToken, speak
from nvium_core.loading import LoadedModel

MAX_NEW_TOKENS = 128
TRIALS = 3
OURS, FULL_DEPTH, DENSE = "early exits", "full depth", "dense"
MILLISECONDS = 1000


@dataclass(slots=True)
class Contender:
    """A model with an engine of its own, and what it has spoken: by category, an answer for every prompt and trial."""

    loaded: LoadedModel
    engine: Engine
    answers: dict[str, list[list[SpokenToken]]] = field(default_factory=dict)
    num_cut: int = 0

    def answer(self, category: str, text: str, seed: int, num_tokens: int, room: int) -> None:
        """To at most the last `room` tokens of a prompt."""
        token_ids = self.loaded.tokenizer(text, verbose=False).input_ids
        self.num_cut += len(token_ids) > room
        params = SamplingParams(max_tokens=num_tokens, seed=seed, ignore_eos=True)
        self.answers.setdefault(category, []).append(speak(self.engine, token_ids[-room:], params))

    def milliseconds(self, category: str, first: int = 0) -> list[float]:
        """Per token of each answer, from its token `first` on: from 0 the prompt has its share in it."""
        return [MILLISECONDS * fmean(token.seconds for token in answer[first:]) for answer in self.answers[category]]


def contender(loaded: LoadedModel, schedule: Schedule) -> Contender:
    """With an engine for one sequence that finds nothing left of the prompts before. One sequence alone has one next
    block, so all schedules that let tokens leave early are the same."""
    engine = Engine(loaded.model, EngineConfig(schedule=schedule, max_sequences=1, prefix_caching=False))
    speak(engine, [0], SamplingParams(max_tokens=16, seed=0, ignore_eos=True))
    return Contender(loaded, engine)


def measure(
    loaded: LoadedModel,
    twin: LoadedModel | None,
    prompts: Prompts,
    *,
    num_tokens: int = MAX_NEW_TOKENS,
    trials: int = TRIALS,
) -> dict[str, Any]:
    """Times per token of every contender by category, and how many times as long as ours the others take.

    Answers take at most half of the context, the shorter one of the two models; prompts that leave no room for them
    lose their beginning.
    """
    contenders = {OURS: contender(loaded, "sweep"), FULL_DEPTH: contender(loaded, "synchronous")}
    if twin:
        contenders[DENSE] = contender(twin, "sweep")
    context = min(each.engine.context for each in contenders.values())
    num_tokens = min(num_tokens, context // 2)
    turns = cycle((list(contenders.values()), list(contenders.values())[::-1]))
    asked = [(category, text) for _ in range(trials) for category in prompts for text in prompts[category]]
    for seed, (category, text) in enumerate(track(asked, "speaking", transient=True)):
        for each in next(turns):
            each.answer(category, text, seed, num_tokens, context - num_tokens)
    return {
        "max_new_tokens": num_tokens,
        "trials": trials,
        "prompts_cut": contenders[OURS].num_cut // trials,
        **compared(contenders, {category: len(texts) for category, texts in prompts.items()}),
        "staircase": staircase(contenders[OURS]),
    }


def compared(contenders: Mapping[str, Contender], num_prompts: Mapping[str, int]) -> dict[str, Any]:
    """Medians over the answers of each category, and ratios on average over categories."""
    categories = {
        category: {
            "prompts": number,
            "milliseconds": medians(contenders, category, first=0),
            "decoding_milliseconds": medians(contenders, category, first=1),
        }
        for category, number in num_prompts.items()
    }
    others = {name: each for name, each in contenders.items() if name != OURS}
    whole, decoding = (
        {name: ratios_of(each, contenders[OURS], first) for name, each in others.items()} for first in (0, 1)
    )
    return {
        "categories": categories,
        "ratios": {name: mean_ratio(ratios) for name, ratios in whole.items()},
        "ratio_intervals": {name: ratio_interval(ratios) for name, ratios in whole.items()},
        "decoding_ratios": {name: mean_ratio(ratios) for name, ratios in decoding.items()},
        "decoding_ratio_intervals": {name: ratio_interval(ratios) for name, ratios in decoding.items()},
    }


def medians(contenders: Mapping[str, Contender], category: str, first: int) -> dict[str, float]:
    return {name: median(each.milliseconds(category, first)) for name, each in contenders.items()}


def ratios_of(other: Contender, ours: Contender, first: int) -> Ratios:
    """The other's time per token over ours, of every pair spoken in turn."""
    return {name: pairwise(other.milliseconds(name, first), ours.milliseconds(name, first)) for name in ours.answers}


def staircase(ours: Contender) -> list[dict[str, float | None]]:
    """How long a token took, from when the one before it was out, by the exit it left at; first tokens left out. None
    for an exit that no token left at."""
    answers = [answer for of_category in ours.answers.values() for answer in of_category]
    steps: list[dict[str, float | None]] = []
    for exit_, depth in enumerate(ours.loaded.model.config.exit_layers or [], 1):
        times = [MILLISECONDS * token.seconds for answer in answers for token in answer[1:] if token.exit == exit_]
        low, middle, high = np.percentile(times, (25, 50, 75)).tolist() if times else (None, None, None)
        steps.append({"exit": exit_, "layer": depth, "tokens": len(times), "median": middle, "low": low, "high": high})
    return steps
