"""What experiments share: the model to measure, timed runs, and turns.

Contenders take turns, so that noise affects all alike; the result is the median of the turns' ratios.
"""

import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch
from rich.progress import track
from rich.table import Table

from nvium_core.bench.shapes import PAPER_ROUTING, random_model, shape_config
from nvium_core.choices import Device, Precision, Weights
from nvium_core.engine.device import native
from nvium_core.engine.engine import Engine
from nvium_core.engine.events import Completion, Event, FailureEvent
from nvium_core.engine.failures import EngineError
from nvium_core.engine.params import EngineConfig, SamplingParams, require
from nvium_core.engine.schedule.costs import StepCosts
from nvium_core.loading import LoadedModel, load_model, quantize_as, resolve_device, resolve_dtype
from nvium_core.model.nvium import NviumForCausalLM
from nvium_core.model.source import is_gguf
from nvium_core.planning.plan import numbers
from nvium_core.training.chat.conversations import user
from nvium_core.training.chat.examples import prompt_tokens

PROMPT = "Once upon a time there was a"
QUESTIONS = (
    "What is the capital of France, and what is it known for?",
    "Give me three tips for learning to cook.",
    "How does rain form?",
    "Write a short letter to a friend who has moved away.",
    "What is the difference between a frog and a toad?",
    "Tell me a story about a lost umbrella.",
)
"""For a model that chats, where what it says matters."""

PROMPT_TOKENS = 8
"""Of the prompt for a model without a tokenizer."""

Figures = dict[str, Any]
"""An experiment's results, for JSON."""

Request = tuple[list[int], SamplingParams]

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Subject:
    """The model to measure, and a short prompt for it. `chats` are questions in its chat template, if it has one;
    `file` is the GGUF file that it was read from, if it was."""

    name: str
    model: NviumForCausalLM
    prompt: list[int]
    weights: Weights = "auto"
    chats: tuple[list[int], ...] = ()
    file: Path | None = None

    @property
    def context(self) -> int:
        return self.model.config.max_position_embeddings

    def engine(self, **config: Any) -> Engine:
        """A fresh engine; `config` as for `EngineConfig`."""
        return Engine(self.model, EngineConfig(**config))

    def random_tokens(self, count: int, seed: object) -> list[int]:
        """Deterministic in the seed."""
        draws = random.Random(str(seed))
        return [draws.randrange(self.model.config.vocab_size) for _ in range(count)]

    def as_dict(self) -> Figures:
        return {
            "model": self.name,
            "device": str(self.model.device),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "weights": self.weights,
            "instructions": native.instructions() if self.model.device.type == "cpu" else None,
            "threads": torch.get_num_threads(),
        }


def load_subjects(
    model: str | None,
    shape: str | None,
    routing: str | None,
    device: Device,
    dtype: Precision,
    weights: Weights = "auto",
) -> Iterator[Subject]:
    """A folder, a Hub name or the embedded model; or random weights of one or several shapes, "24x768,36x768", with
    forced routing. Raises `InvalidRequest` before the first is loaded."""
    require(routing is None or shape is not None, "routing", "can be forced on random weights only; give a shape too")
    if shape is None:
        yield replace(subject_of(load_model(model, device, dtype, weights=weights)), weights=weights)
        return
    require(model is None, "shape", "cannot be given together with a model")
    shares = numbers(routing, "routing") if routing else PAPER_ROUTING
    for each in (shapes := shape.split(",")):
        shape_config(each, len(shares))
    for each in shapes:
        yield random_subject(each, shares, device, dtype, weights)


def subject_of(loaded: LoadedModel) -> Subject:
    tokenizer = loaded.tokenizer
    chats = [prompt_tokens([user(question)], tokenizer) for question in QUESTIONS if tokenizer.chat_template]
    file = loaded.folder if loaded.folder and is_gguf(loaded.folder) else None
    return Subject(loaded.name, loaded.model, tokenizer(PROMPT).input_ids, chats=tuple(chats), file=file)


def random_subject(
    shape: str, routing: Sequence[float], device: Device, dtype: Precision, weights: Weights = "auto"
) -> Subject:
    place = resolve_device(device)
    model = random_model(
        shape, num_exits=len(routing), routing=routing, dtype=resolve_dtype(dtype, place), device=place
    )
    quantize_as(model, weights)
    return Subject(f"random-{shape}", model, list(range(1, PROMPT_TOKENS + 1)), weights)


@dataclass(slots=True)
class Timed:
    """The result of requests started together. Times are in seconds since then; `processor_seconds` are of all threads
    of this process, which others on the same core do not lengthen.

    `first_token_seconds` and `completions` have an entry for each choice of each request, in order.
    """

    seconds: float
    first_token_seconds: list[float] = field(default_factory=list)
    completions: list[Completion] = field(default_factory=list)
    processor_seconds: float = 0.0

    @property
    def num_tokens(self) -> int:
        return sum(len(completion.token_ids) for completion in self.completions)

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def later_tokens_per_second(self) -> float:
        """Of all tokens but the first ones, while all sequences run."""
        return (self.num_tokens - len(self.completions)) / (self.seconds - max(self.first_token_seconds))

    @property
    def generated(self) -> list[tuple[list[int], list[int]]]:
        """Of every choice."""
        return [(completion.token_ids, completion.exits) for completion in self.completions]


def timed(
    engine: Engine, requests: Sequence[Request], after_step: Callable[[list[Event]], None] | None = None
) -> Timed:
    """Run requests to completion together, on an idle engine. Raises `EngineError` if one fails."""
    started, processor_started = time.perf_counter(), time.process_time()
    first_seconds: dict[tuple[str, int], float] = {}
    completions = {key: Completion() for number, request in enumerate(requests) for key in keys(number, request)}
    for number, (prompt, params) in enumerate(requests):
        engine.add(str(number), prompt, params)
    while engine.has_work:
        events = engine.step()
        now = time.perf_counter() - started
        for event in events:
            completions[event.sequence_id, event.choice].append(checked(event))
            first_seconds.setdefault((event.sequence_id, event.choice), now)
        if after_step:
            after_step(events)
    seconds = time.perf_counter() - started
    processor_seconds = time.process_time() - processor_started
    return Timed(seconds, [first_seconds[key] for key in completions], list(completions.values()), processor_seconds)


def keys(number: int, request: Request) -> list[tuple[str, int]]:
    """(sequence id, choice) of a request's events."""
    params = request[1]
    return [(str(number), choice) for choice in range(params.choice, params.choice + params.num_choices)]


def checked(event: Event) -> Any:
    """Raises `EngineError` for a failure."""
    if isinstance(event, FailureEvent):
        raise EngineError(event.message)
    return event


def take_turns(turn: Callable[[int], Result], repeats: int, label: str) -> list[Result]:
    """The result of every turn but the first, which warms up; shows progress on a terminal."""
    return [turn(number) for number in track(range(repeats + 1), label, transient=True)][1:]


def interleaved(
    contenders: Mapping[str, Callable[[int], Result]], repeats: int, label: str, seconds: float = math.inf
) -> dict[str, list[Result]]:
    """Each contender's results by turn, after a turn that warms up. Every other turn runs in reverse order.

    A contender that would exceed its share of the seconds takes fewer turns, at least one.
    """
    results: dict[str, list[Result]] = {name: [] for name in contenders}
    clocks = {name: Clock(seconds / len(contenders)) for name in contenders}
    for number in track(range(repeats + 1), label, transient=True):
        for name, contender in list(contenders.items())[:: -1 if number % 2 else 1]:
            if number < 2 or clocks[name].has_time:
                result = clocks[name].timed(contender, number)
                results[name] += [result] if number else []
    return results


@dataclass(slots=True)
class Clock:
    """A contender's time, in seconds."""

    allowed: float
    spent: float = 0.0
    num_turns: int = 0

    @property
    def has_time(self) -> bool:
        """For another turn of average length. Once False, always False."""
        if self.spent * (1 + 1 / self.num_turns) > self.allowed:
            self.allowed = 0.0
        return self.allowed > 0

    def timed(self, contender: Callable[[int], Result], number: int) -> Result:
        started = time.perf_counter()
        result = contender(number)
        self.spent += time.perf_counter() - started
        self.num_turns += 1
        return result


def median_ratio(values: Sequence[float], baselines: Sequence[float]) -> float:
    """The median of ratios turn by turn, over the turns that both took."""
    return median(value / baseline for value, baseline in zip(values, baselines, strict=False))


def pointwise(mean: Callable[[Iterable[float]], float], measured: Sequence[StepCosts]) -> dict[int, dict[int, float]]:
    """The mean for each block and number of rows."""
    points = [costs.points for costs in measured]
    return {
        block: {rows: mean([each[block][rows] for each in points]) for rows in costs}
        for block, costs in points[0].items()
    }


def num_differing(some: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> int:
    """Positions at which lists differ, including those that only one list has."""
    pairs = list(zip(some, others, strict=True))
    unequal = sum(a != b for one, other in pairs for a, b in zip(one, other, strict=False))
    return unequal + sum(abs(len(one) - len(other)) for one, other in pairs)


def plain_table(figures: Mapping[str, Any]) -> Table:
    """A row for each scalar; lists and tables are in the JSON only."""
    table = Table("figure", "value")
    for name, value in figures.items():
        if not isinstance(value, list | dict):
            table.add_row(name.replace("_", " "), shown(value))
    return table


def shown(value: object) -> str:
    """Floats with four digits."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
