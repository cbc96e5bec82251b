"""Measure speed on Spec-Bench's prompts by category, with our protocol and with that of the N-vium authors' scripts.

    python -m research.speed.spec_bench MODEL --twin DENSE --questions question.jsonl --json spec-bench.json

Prompts are the first turns of Spec-Bench's `question.jsonl`. As in the benchmark's tables, the eight kinds of MT-Bench
questions are one category, multi-turn.
"""

import json
from argparse import ArgumentParser
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nvium_core.bench.figures import Figures, write_json
from nvium_core.engine.device.processor import use_processor
from nvium_core.engine.params import SamplingParams
from nvium_core.evaluation.paired import Interval, Sample, interval
from nvium_core.evaluation.predictions import EvaluationError
from nvium_core.evaluation.suite import check_dense, description
from nvium_core.loading import LoadedModel, load_model
from research.markdown import table
from research.speed.per_token import (
    DENSE,
    FULL_DEPTH,
    OURS,
    TRIALS,
    Answers,
    Prompts,
    as_markdown,
    engines,
    generators,
    measure,
    ratios_shown,
    speed_up,
    take_turns,
    tokenize_prompts,
)

PAPER_TOP_K = 50
MULTI_TURN = "multi-turn"
MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")


def read_prompts(path: Path, per_category: int | None = None) -> Prompts:
    """Read the first `per_category` prompts of every category. Raise `EvaluationError` naming an invalid line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise EvaluationError(f"{path}: {error}") from error
    prompts: dict[str, list[str]] = {}
    for number, line in enumerate(lines, 1):
        category, text = first_turn(line, f"{path}, line {number}")
        prompts.setdefault(MULTI_TURN if category in MT_BENCH else category, []).append(text)
    if not prompts:
        raise EvaluationError(f"{path}: no questions")
    return {category: texts[:per_category] for category, texts in prompts.items()}


def first_turn(line: str, place: str) -> tuple[str, str]:
    """Parse a line's category and first turn."""
    try:
        question: Any = json.loads(line)
        category, text = question["category"], question["turns"][0]
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise EvaluationError(f"{place}: must be an object with a category and turns ({error!r})") from error
    if not (isinstance(category, str) and isinstance(text, str)):
        raise EvaluationError(f"{place}: category and turns must be strings")
    return category, text


Totals = Mapping[str, Sequence[tuple[int, float]]]
"""By category, the number of tokens and the seconds of every answer."""


def rate(answers: Sequence[tuple[int, float]]) -> float:
    """Return the tokens of all answers divided by their seconds."""
    return sum(count for count, _ in answers) / sum(seconds for _, seconds in answers)


def rate_ratio(ours: Totals, others: Totals) -> float:
    """Return the ratio of our rate to the other model's rate, over all categories together."""
    return rate(list(chain(*ours.values()))) / rate(list(chain(*others.values())))


def category_rate_ratio(ours: Totals, others: Totals) -> float:
    """Return the ratio of our rate to the other model's rate, averaged over categories."""
    return fmean(rate(ours[name]) / rate(others[name]) for name in ours)


def rate_ratio_interval(ours: Totals, others: Totals) -> Interval | None:
    return totals_interval(ours, others, lambda our_2CS, other_2CS: rates(our_2CS.sum(1)) / rates(other_2CS.sum(1)))


def category_rate_ratio_interval(ours: Totals, others: Totals) -> Interval | None:
    return totals_interval(ours, others, lambda our_2CS, other_2CS: (rates(our_2CS) / rates(other_2CS)).mean(0))


def rates(total_2: NDArray[np.float64]) -> NDArray[np.float64]:
    tokens, seconds = total_2
    found: NDArray[np.float64] = tokens / seconds
    return found


def totals_interval(
    ours: Totals,
    others: Totals,
    statistic: Callable[[NDArray[np.float64], NDArray[np.float64]], NDArray[np.float64]],
) -> Interval | None:
    """Return the bootstrap interval of a statistic of two models, with paired samples.

    `statistic` takes the tokens and seconds of each model, [2, categories, resamples].
    """

    def resampled(of: Totals, samples: list[Sample]) -> NDArray[np.float64]:
        pairs = zip(of.values(), samples, strict=True)
        return np.stack([np.asarray(answers)[sample].sum(1).T for answers, sample in pairs], axis=1)

    counts = [len(answers) for answers in ours.values()]
    return interval(counts, lambda samples: statistic(resampled(ours, samples), resampled(others, samples)))


def as_paper(
    loaded: LoadedModel,
    twin: LoadedModel | None,
    prompts: Prompts,
    trials: int = TRIALS,
) -> Figures:
    """Measure speed as the authors' scripts do.

    Prompts are truncated to leave room for the answer: to 896 tokens if the context is 1,024. Top-k is 50, and answers
    may end early. Speed is the number of tokens divided by the seconds of all answers, by category and overall.
    """
    running = engines(loaded, twin)
    context = min(each.context for each in running.values())
    prompt_set = tokenize_prompts(loaded.tokenizer, prompts, context, cut_end=True)
    params = partial(SamplingParams, max_tokens=prompt_set.max_new_tokens, top_k=PAPER_TOP_K)
    answers = take_turns(generators(running, params), prompt_set, trials)
    totals = {name: totals_of(each) for name, each in answers.items()}
    others = {name: each for name, each in totals.items() if name != OURS}
    return {
        "prompt_tokens": context - prompt_set.max_new_tokens,
        "prompts_cut": prompt_set.prompts_cut,
        "max_new_tokens": prompt_set.max_new_tokens,
        "top_k": PAPER_TOP_K,
        "trials": trials,
        "tokens": {name: sum(count for part in each.values() for count, _ in part) for name, each in totals.items()},
        "tokens_per_second": {
            category: {name: rate(each[category]) for name, each in totals.items()} for category in prompt_set.prompts
        },
        "ratios": {name: rate_ratio(totals[OURS], each) for name, each in others.items()},
        "ratio_intervals": {name: rate_ratio_interval(totals[OURS], each) for name, each in others.items()},
        "category_ratios": {name: category_rate_ratio(totals[OURS], each) for name, each in others.items()},
        "category_ratio_intervals": {
            name: category_rate_ratio_interval(totals[OURS], each) for name, each in others.items()
        },
    }


def totals_of(answers: Answers) -> dict[str, list[tuple[int, float]]]:
    """Return the number of tokens and the seconds of every answer."""
    return {
        category: [(len(answer), sum(token.seconds for token in answer)) for answer in of_category]
        for category, of_category in answers.items()
    }


def as_paper_section(measured: Figures) -> str:
    """Format tokens per second by category, and the ratios."""
    names = list(measured["tokens"])
    rows = [[category, *(of[name] for name in names)] for category, of in measured["tokens_per_second"].items()]
    for title, kind in (("**ratio of early exits, all tokens**", "ratio"), ("mean over categories", "category_ratio")):
        ratios = measured[f"{kind}s"]
        shown_of = dict(zip(ratios, ratios_shown(ratios, measured[f"{kind}_intervals"]), strict=True))
        rows.append([title, *(shown_of.get(name) for name in names)])
    return f"## Tokens per second as the paper measures\n\n{table(['category', *names], rows)}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(prog="python -m research.speed.spec_bench", description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help="folder or Hub name [the bundled model]")
    parser.add_argument("--twin", help="folder of the dense twin")
    parser.add_argument("--questions", type=Path, required=True, help="Spec-Bench's question.jsonl")
    parser.add_argument("--prompts", type=int, help="prompts per category [all]")
    parser.add_argument("--trials", type=int, default=TRIALS)
    parser.add_argument("--threads", default="auto")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    use_processor("auto", args.threads)
    loaded = load_model(args.model, "cpu")
    twin = load_model(args.twin, "cpu") if args.twin else None
    if twin:
        check_dense(loaded, twin)
    prompts = read_prompts(args.questions, args.prompts)
    measured, papers = measure(loaded, twin, prompts, trials=args.trials), as_paper(loaded, twin, prompts, args.trials)
    figures = description(loaded) | speed_up(measured, DENSE if twin else FULL_DEPTH)
    figures["latency_as_paper"] = papers
    print(f"{as_markdown(figures)}\n\n{as_paper_section(papers)}")
    if args.json:
        write_json(figures, args.json)


if __name__ == "__main__":
    main()
