"""Milliseconds per token by category of prompt: a model, the same model at full depth, and its dense twin.

One request at a time, 128 new tokens, three trials; a token's share of the total time, prefill included; the mean over
categories of dense over ours. Every answer has the same length, end-of-text or not. Models take turns at every prompt.
A category's time is the median over its answers and its ratio the median over pairs measured in the same turn, so that
noise affects all alike. `as_paper` follows the authors' script instead.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean, median

import numpy as np

from nvium_core.bench.harness import Figures, checked
from nvium_core.choices import Clock, Schedule
from nvium_core.engine.engine import Engine
from nvium_core.engine.params import EngineConfig, SamplingParams
from nvium_core.evaluation.paired import (
    category_rate_ratio,
    category_rate_ratio_interval,
    mean_ratio,
    pairwise,
    rate,
    rate_ratio,
    rate_ratio_interval,
    ratio_interval,
)
from nvium_core.evaluation.spec_bench import Prompts
from nvium_core.evaluation.turns import MAX_NEW_TOKENS, TRIALS, questions, take_turns
from nvium_core.loading import LoadedModel
from nvium_core.model.nvium import NviumForCausalLM

OURS, FULL_DEPTH, DENSE = "early exits", "full depth", "dense"
MILLISECONDS = 1000
PAPER_TOP_K = 50
CLOCKS: Mapping[Clock, Callable[[], float]] = {"wall": time.perf_counter, "processor": time.process_time}
"""In seconds. The processor's time, of all threads, leaves out that others' programs ran meanwhile. What several
do at once it adds up, so a speed in it is one thread's."""


@dataclass(frozen=True, slots=True)
class TimedToken:
    """A token, its exit (from 1) with p_k, and the seconds since the previous token, or since the request."""

    token_id: int
    exit: int
    exit_probability: float
    seconds: float


Answer = list[TimedToken]
Answers = Mapping[str, Sequence[Answer]]
"""By category, one for every prompt and trial."""


def generate(engine: Engine, prompt: Sequence[int], params: SamplingParams, clock: Clock = "wall") -> Answer:
    """Continue a prompt on an idle engine. Raises `EngineError` if it fails."""
    now_of = CLOCKS[clock]
    last = now_of()
    engine.add("answer", list(prompt), params)
    answer = Answer()
    while engine.has_work:
        events, now = engine.step(), now_of()
        for event in map(checked, events):
            answer.append(TimedToken(event.token_id, event.exit, event.exit_probability, now - last))
            last = now
    return answer


def warm_engine(model: NviumForCausalLM, schedule: Schedule) -> Engine:
    """For one sequence, without prefix caching. A lone sequence has one next block, so all schedules with early exits
    are the same."""
    engine = Engine(model, EngineConfig(schedule=schedule, max_sequences=1, prefix_caching=False))
    generate(engine, [0], SamplingParams(max_tokens=16, seed=0, ignore_eos=True))
    return engine


def engines(loaded: LoadedModel, twin: LoadedModel | None) -> dict[str, Engine]:
    found = {OURS: warm_engine(loaded.model, "sweep"), FULL_DEPTH: warm_engine(loaded.model, "synchronous")}
    return found | {DENSE: warm_engine(twin.model, "sweep")} if twin else found


def generators(
    running: Mapping[str, Engine], params: Callable[..., SamplingParams], clock: Clock = "wall"
) -> dict[str, Callable[[list[int], int], Answer]]:
    """For each engine a function from a prompt and a seed to an answer."""

    def answer(engine: Engine, prompt: list[int], seed: int) -> Answer:
        return generate(engine, prompt, params(seed=seed), clock)

    return {name: partial(answer, engine) for name, engine in running.items()}


def measure(
    loaded: LoadedModel,
    twin: LoadedModel | None,
    prompts: Prompts,
    *,
    num_tokens: int = MAX_NEW_TOKENS,
    trials: int = TRIALS,
    clock: Clock = "wall",
) -> Figures:
    """Times per token of every model by category, and the ratios to ours."""
    running = engines(loaded, twin)
    asked = questions(loaded.tokenizer, prompts, min(each.context for each in running.values()), num_tokens)
    params = partial(SamplingParams, max_tokens=asked.max_new_tokens, ignore_eos=True)
    answers = take_turns(generators(running, params, clock), asked, trials)
    return {
        "clock": clock,
        "max_new_tokens": asked.max_new_tokens,
        "trials": trials,
        "prompts_cut": asked.prompts_cut,
        **compared(answers, asked.counts),
        "staircase": staircase(answers[OURS], loaded.model.config.exit_layers or []),
    }


def compared(answers: Mapping[str, Answers], num_prompts: Mapping[str, int]) -> Figures:
    """Medians over the answers of each category, and mean ratios over categories."""
    parts = {"": 0, "decoding_": 1}
    categories = {
        category: {"prompts": number}
        | {f"{part}milliseconds": medians(answers, category, first) for part, first in parts.items()}
        for category, number in num_prompts.items()
    }
    figures: Figures = {"categories": categories}
    for part, first in parts.items():
        ratios = {name: ratios_of(each, answers[OURS], first) for name, each in answers.items() if name != OURS}
        figures[f"{part}ratios"] = {name: mean_ratio(each) for name, each in ratios.items()}
        figures[f"{part}ratio_intervals"] = {name: ratio_interval(each) for name, each in ratios.items()}
    return figures


def milliseconds(answers: Sequence[Answer], first: int = 0) -> list[float]:
    """Per token of each answer, from its token `first` on; from 0 prefill is included."""
    return [MILLISECONDS * fmean(token.seconds for token in answer[first:]) for answer in answers]


def medians(answers: Mapping[str, Answers], category: str, first: int) -> dict[str, float]:
    return {name: median(milliseconds(each[category], first)) for name, each in answers.items()}


def ratios_of(other: Answers, ours: Answers, first: int) -> dict[str, list[float]]:
    """The other's time per token over ours, of every pair measured in the same turn."""
    return {name: pairwise(milliseconds(other[name], first), milliseconds(ours[name], first)) for name in ours}


def staircase(ours: Answers, exit_layers: Sequence[int]) -> list[dict[str, float | None]]:
    """Time since the previous token, by exit; first tokens left out. None for an unused exit."""
    answers = [answer for of_category in ours.values() for answer in of_category]
    steps: list[dict[str, float | None]] = []
    for exit_, depth in enumerate(exit_layers, 1):
        times = [MILLISECONDS * token.seconds for answer in answers for token in answer[1:] if token.exit == exit_]
        low, middle, high = np.percentile(times, (25, 50, 75)).tolist() if times else (None, None, None)
        steps.append({"exit": exit_, "layer": depth, "tokens": len(times), "median": middle, "low": low, "high": high})
    return steps


def as_paper(
    loaded: LoadedModel, twin: LoadedModel | None, prompts: Prompts, trials: int = TRIALS, clock: Clock = "wall"
) -> Figures:
    """Speed as the authors' scripts measure it: a prompt's first tokens, as many as leave room for the answer (896 of
    1,024); top-k 50; answers that end at end-of-text. Speed is all tokens over all seconds, of a category and of all
    together; ratios are of the latter, and on average over categories."""
    running = engines(loaded, twin)
    context = min(each.context for each in running.values())
    asked = questions(loaded.tokenizer, prompts, context, cut_end=True)
    params = partial(SamplingParams, max_tokens=asked.max_new_tokens, top_k=PAPER_TOP_K)
    answers = take_turns(generators(running, params, clock), asked, trials)
    totals = {name: totals_of(each) for name, each in answers.items()}
    others = {name: each for name, each in totals.items() if name != OURS}
    return {
        "clock": clock,
        "prompt_tokens": context - asked.max_new_tokens,
        "prompts_cut": asked.prompts_cut,
        "max_new_tokens": asked.max_new_tokens,
        "top_k": PAPER_TOP_K,
        "trials": trials,
        "tokens": {name: sum(count for part in each.values() for count, _ in part) for name, each in totals.items()},
        "tokens_per_second": {
            category: {name: rate(each[category]) for name, each in totals.items()} for category in asked.prompts
        },
        "ratios": {name: rate_ratio(totals[OURS], each) for name, each in others.items()},
        "ratio_intervals": {name: rate_ratio_interval(totals[OURS], each) for name, each in others.items()},
        "category_ratios": {name: category_rate_ratio(totals[OURS], each) for name, each in others.items()},
        "category_ratio_intervals": {
            name: category_rate_ratio_interval(totals[OURS], each) for name, each in others.items()
        },
    }


def totals_of(answers: Answers) -> dict[str, list[tuple[int, float]]]:
    """Tokens and seconds of every answer."""
    return {
        category: [(len(answer), sum(token.seconds for token in answer)) for answer in of_category]
        for category, of_category in answers.items()
    }
