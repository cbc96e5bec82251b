"""Measure milliseconds per token by category of prompts: a model, the same model at full depth, and its dense twin.

    python -m research.speed.per_token MODEL DENSE --data valid.txt.xz --json evaluation.json

One request runs at a time, with 128 new tokens and three trials. Models take turns at every prompt. All answers have
the same length. The time per token is an answer's total time, prefill included, divided by its number of tokens. A
category's time is the median over its answers. A category's ratio is the median over pairs of answers in the same turn.
The speed-up is the mean ratio over categories. The results are added to `--json`, which may be the JSON of `nvium
evaluate MODEL --twin DENSE`.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any

import numpy as np
import typer
from rich.progress import track

from nvium_core.bench.figures import Figures, write_json
from nvium_core.choices import Schedule
from nvium_core.engine.config import EngineConfig
from nvium_core.engine.engine import Engine
from nvium_core.engine.events import FailureEvent, TokenEvent
from nvium_core.engine.sampling_params import SamplingParams
from nvium_core.evaluation.suite import Interval, check_dense, description, interval, with_interval
from nvium_core.loading import LoadedModel, load_model
from nvium_core.model.nvium import Nvium
from nvium_core.training.caveats import caveats, warnings
from nvium_core.training.data.texts import documents_of
from research.markdown import table
from research.speed.prompts import MAX_NEW_TOKENS, Prompts, PromptSet, openings, read_questions, tokenize_prompts

OURS, FULL_DEPTH, DENSE = "early exits", "full depth", "dense"
MILLISECONDS = 1000
TRIALS = 3

Ratios = Mapping[str, Sequence[float]]
"""By category, the ratio of the other model's time to ours, for every pair of answers in the same turn."""


@dataclass(frozen=True, slots=True)
class TimedToken:
    """A token, its exit (from 1), the exit's p_k, and the seconds since the previous token or since the request."""

    token_id: int
    exit: int
    exit_probability: float
    seconds: float


Answer = list[TimedToken]
Answers = Mapping[str, Sequence[Answer]]
"""By category, one answer per prompt and trial."""

Generate = Callable[[list[int], int], Answer]
"""Answers a prompt with a seed."""


def take_turns(
    generators: Mapping[str, Generate],
    prompt_set: PromptSet,
    trials: int = TRIALS,
) -> Mapping[str, Answers]:
    """Return every generator's answers to every prompt in every trial, by category.

    All generators answer one prompt, then all answer the next. Their order is reversed at every second prompt.
    """
    answers = {name: {category: list[Answer]() for category in prompt_set.prompts} for name in generators}
    once = [(category, prompt) for category, of_category in prompt_set.prompts.items() for prompt in of_category]
    turns: cycle[Sequence[str]] = cycle((list(generators), list(generators)[::-1]))
    rounds = list(enumerate(once * trials))
    for seed, (category, prompt) in track(rounds, "generating", transient=True):
        for name in next(turns):
            answers[name][category].append(generators[name](prompt, seed))
    return answers


def generate(engine: Engine, prompt: Sequence[int], params: SamplingParams) -> Answer:
    """Continue a prompt on an idle engine. Raise `EngineError` if the request fails."""
    last = time.perf_counter()
    engine.add("answer", list(prompt), params)
    answer = Answer()
    while engine.has_work:
        events, now = engine.step(), time.perf_counter()
        for event in events:  # divide the Step's time evenly among its tokens
            if isinstance(event, FailureEvent):
                raise event.error
            assert isinstance(event, TokenEvent)
            each = (now - last) / len(events)
            answer.append(TimedToken(event.token_id, event.exit, event.exit_probability, each))
        last = now if events else last
    return answer


def warm_engine(model: Nvium, schedule: Schedule) -> Engine:
    """Return a warm engine for one sequence. For one sequence, all schedules with early exits are equivalent."""
    engine = Engine(model, EngineConfig(schedule=schedule, max_sequences=1, prefix_caching=False))
    generate(engine, [0], SamplingParams(max_tokens=16, seed=0, ignore_eos=True))
    return engine


def generator(engine: Engine, prompt_set: PromptSet, **sampling: Any) -> Generate:
    """Return a function that generates answers of the set's length, with these other sampling parameters."""
    params = partial(SamplingParams, max_tokens=prompt_set.max_new_tokens, ignore_eos=True, **sampling)
    return lambda prompt, seed: generate(engine, prompt, params(seed=seed))


def measure(
    loaded: LoadedModel,
    twin: LoadedModel,
    prompts: Prompts,
    *,
    num_tokens: int = MAX_NEW_TOKENS,
    trials: int = TRIALS,
) -> Figures:
    """Measure every model's time per token by category, and the ratios to ours."""
    running = {
        OURS: warm_engine(loaded.model, "sweep"),
        FULL_DEPTH: warm_engine(loaded.model, "whole"),
        DENSE: warm_engine(twin.model, "sweep"),
    }
    prompt_set = tokenize_prompts(loaded.tokenizer, prompts, min(each.context for each in running.values()), num_tokens)
    answers = take_turns({name: generator(each, prompt_set) for name, each in running.items()}, prompt_set, trials)
    return latency(answers, prompt_set, trials, loaded.model.config.exit_layers or [])


def latency(answers: Mapping[str, Answers], prompt_set: PromptSet, trials: int, exit_layers: Sequence[int]) -> Figures:
    """Return the protocol, every model's time per token by category, the ratios to ours, and our time by exit."""
    return {
        "max_new_tokens": prompt_set.max_new_tokens,
        "trials": trials,
        "prompts_cut": prompt_set.prompts_cut,
        **compared(answers, prompt_set.counts),
        "staircase": staircase(answers[OURS], exit_layers),
    }


def compared(answers: Mapping[str, Answers], num_prompts: Mapping[str, int]) -> Figures:
    """Return median times per category, and the ratio of each model's time to ours, averaged over categories."""
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
        figures[f"{part}ratio_intervals"] = {name: ratio_interval(each, num_prompts) for name, each in ratios.items()}
    return figures


def milliseconds(answers: Sequence[Answer], first: int = 0) -> list[float]:
    """Return each answer's milliseconds per token, from token `first` on. The time of token 0 includes the prefill."""
    return [MILLISECONDS * fmean(token.seconds for token in answer[first:]) for answer in answers]


def medians(answers: Mapping[str, Answers], category: str, first: int) -> dict[str, float]:
    return {name: median(milliseconds(each[category], first)) for name, each in answers.items()}


def ratios_of(other: Answers, ours: Answers, first: int) -> dict[str, list[float]]:
    """Return the ratio of the other model's time per token to ours, for each pair of answers in the same turn."""
    return {name: pairwise(milliseconds(other[name], first), milliseconds(ours[name], first)) for name in ours}


def staircase(ours: Answers, exit_layers: Sequence[int]) -> list[dict[str, float | None]]:
    """Return quartiles of the time since the previous token, by exit. Omit first tokens. An unused exit has None."""
    answers = [answer for of_category in ours.values() for answer in of_category]
    steps: list[dict[str, float | None]] = []
    for exit_, depth in enumerate(exit_layers, 1):
        times = [MILLISECONDS * token.seconds for answer in answers for token in answer[1:] if token.exit == exit_]
        low, middle, high = np.percentile(times, (25, 50, 75)).tolist() if times else (None, None, None)
        steps.append({"exit": exit_, "layer": depth, "tokens": len(times), "median": middle, "low": low, "high": high})
    return steps


def pairwise(others: Sequence[float], ours: Sequence[float]) -> list[float]:
    return [other / our for other, our in zip(others, ours, strict=True)]


def mean_ratio(ratios: Ratios) -> float:
    """Return the median ratio of the pairs, averaged over categories."""
    return fmean(median(of_category) for of_category in ratios.values())


def ratio_interval(ratios: Ratios, num_prompts: Mapping[str, int]) -> Interval | None:
    """Return the interval of the mean ratio. The trials of a prompt are resampled together."""
    trials = [np.reshape(of_category, (-1, num_prompts[category])) for category, of_category in ratios.items()]
    return interval(
        [by_prompt.shape[1] for by_prompt in trials],
        lambda samples: np.mean(
            [np.median(by_prompt[:, sample], axis=(0, 2)) for by_prompt, sample in zip(trials, samples, strict=True)],
            axis=0,
        ),
    )


def speed_up(measured: Figures) -> Figures:
    """Return times per token, and the speed-up over the dense twin in percent, with its interval."""
    interval = measured["ratio_intervals"][DENSE]
    return {
        "latency": measured,
        "speed_up_over": DENSE,
        "speed_up_percent": 100 * (measured["ratios"][DENSE] - 1),
        "speed_up_interval_percent": interval and [100 * (bound - 1) for bound in interval],
    }


def as_markdown(figures: Figures) -> str:
    """Format warnings, milliseconds by category, and the ratios."""
    measured = figures["latency"]
    names = ["early exits", *measured["ratios"]]
    rows = [
        [category, each["prompts"], *(f"{each['milliseconds'][name]:.3f}" for name in names)]
        for category, each in measured["categories"].items()
    ]
    rows += [
        [title, None, None, *ratios_shown(measured[f"{name}s"], measured.get(f"{name}_intervals", {}))]
        for title, name in (("**ratio to early exits**", "ratio"), ("after the first token", "decoding_ratio"))
    ]
    protocol = (
        f"Milliseconds per token, prefill included: the median over answers of {measured['max_new_tokens']} tokens, "
        f"{measured['trials']} trials, in turns. A ratio is the median over pairs of answers in the same turn, "
        "averaged over categories. Brackets contain 95% of bootstrap samples of the prompts. "
        f"{measured['prompts_cut']} prompts were too long and lost their beginning."
    )
    columns = ["category", "prompts", *names]
    steps = [[s["exit"], s["layer"], s["tokens"], s["low"], s["median"], s["high"]] for s in measured["staircase"]]
    stairs = table(["exit", "layer", "tokens", "ms, 25%", "median", "75%"], steps)
    by_exit = f"Time since the previous token, by exit:\n\n{stairs}"
    return "\n\n".join(["## Speed", *warnings(figures), protocol, table(columns, rows), by_exit])


def ratios_shown(ratios: Mapping[str, float], intervals: Mapping[str, Sequence[float] | None]) -> list[str]:
    return [with_interval(f"{ratio:.3f}", intervals.get(name), level=1) for name, ratio in ratios.items()]


def main(
    model: str,
    twin: str,
    data: Annotated[Path | None, typer.Option(help="Text whose openings are the prompts.")] = None,
    questions: Annotated[Path | None, typer.Option(help="Spec-Bench's question.jsonl, instead of --data.")] = None,
    prompts: Annotated[int | None, typer.Option(help="Questions of each category [all].")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Evaluation to add to, or a new file.")] = None,
) -> None:
    """Measure time per token of a model, of the same model at full depth, and of its dense twin."""
    if questions:
        asked = read_questions(questions, prompts)
    elif data:
        asked = openings(list(documents_of(data)))
    else:
        raise typer.BadParameter("pass --data or --questions")
    loaded, dense = load_model(model), load_model(twin)
    check_dense(loaded, dense)
    known = json.loads(json_file.read_text(encoding="utf-8")) if json_file and json_file.exists() else {}
    about = description(loaded) | {"twin": description(dense)}
    figures = about | known | speed_up(measure(loaded, dense, asked))
    print(as_markdown(figures))
    if json_file:
        write_json(figures | {"caveats": caveats(figures)}, json_file)


if __name__ == "__main__":
    typer.run(main)
