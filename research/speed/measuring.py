"""What speed measurements share: options, requests and reports."""

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from rich.console import Console
from rich.table import Table

from nvium_core.bench.figures import Figures, write_json
from nvium_core.bench.harness import Request, Subject, subject_of
from nvium_core.choices import Device, Precision, Weights
from nvium_core.engine.device.processor import use_processor
from nvium_core.engine.engine import Engine
from nvium_core.engine.events import Event, FailureEvent
from nvium_core.engine.params import EngineConfig, SamplingParams
from nvium_core.loading import load_model


def parser(name: str, description: str | None) -> ArgumentParser:
    options = ArgumentParser(prog=f"python -m research.{name}", description=description)
    add = options.add_argument
    add("--model", help="folder, Hub name or GGUF file [the bundled model]")
    add("--device", choices=get_args(Device), default="auto")
    add("--dtype", choices=get_args(Precision), default="auto")
    add("--weights", choices=get_args(Weights), default="auto")
    add("--threads", default="1", help="number of threads, or auto [1]")
    add("--repeats", type=int, default=5, help="number of measured turns, in which contenders alternate [5]")
    add("--json", type=Path, help="also write the results to this file")
    return options


def load(args: Namespace) -> Subject:
    use_processor("auto", args.threads)
    loaded = load_model(args.model, args.device, args.dtype, weights=args.weights)
    return replace(subject_of(loaded), weights=args.weights)


def engine_of(subject: Subject, **config: Any) -> Engine:
    return Engine(subject.model, EngineConfig(**config))


def checked(event: Event) -> Any:
    if isinstance(event, FailureEvent):
        raise event.error
    return event


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def requests(prompt: Sequence[int], params: Sequence[SamplingParams]) -> list[Request]:
    return [(list(prompt), each) for each in params]


def seeds(turn: int, count: int) -> range:
    """Return `count` seeds that no other turn uses."""
    return range(turn * count, (turn + 1) * count)


def report(subject: Subject, figures: Figures, table: Table, file: Path | None) -> None:
    Console().print(table)
    if file:
        write_json({**subject.as_dict(), **figures}, file)
