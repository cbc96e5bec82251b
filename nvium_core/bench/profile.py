"""Where a step's time goes: by parts of the engine on a stopwatch, and by kinds of operations under torch's profiler.

The stopwatch costs next to nothing and partitions the whole; the profiler slows operations down and sees PyTorch's
only, so its figures are shares of its own run.
"""

import time
from collections import Counter
from collections.abc import Sequence
from operator import itemgetter

import torch
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

from nvium_core.bench.contenders import own
from nvium_core.bench.contenders.contender import Race
from nvium_core.bench.harness import Figures, Subject
from nvium_core.bench.seams import KERNELS, PARTS, watched
from nvium_core.engine.engine import Engine
from nvium_core.engine.params import require

KINDS = {
    "attention": ("attention",),
    "linear": ("linear", "matmul", "mm", "mv"),
    "waiting": ("item", "local_scalar_dense", "Synchronize"),
}
"""Kinds of operations by what is in their names; all others are elementwise, copies and views."""

OTHERS, OUTSIDE = "elementwise and copies", "outside operations"
NUM_SMALLEST_CALLS = 2000
CAPTION = "Milliseconds of a step by part; shares of a run under torch's profiler by kind."


def measure(subject: Subject, *, sequences: Sequence[int] = (1,), tokens: int = 64, repeats: int = 3) -> Figures:
    """A row for each number of sequences, of `tokens` tokens each; of the runs on the stopwatch the fastest counts."""
    room = subject.context - len(subject.prompt)
    require(tokens <= room, "tokens", f"after the prompt there is room for {room}, got {tokens}")
    races = [Race(prompt=subject.prompt, num_sequences=number, num_tokens=tokens) for number in sequences]
    return {"tokens": tokens, "rows": [dissect(subject, race, repeats) for race in races]}


def dissect(subject: Subject, race: Race, repeats: int) -> Figures:
    engine = own.engine_for(subject.model, race)
    engine.calibrate()
    own.contender(engine, race)(0)
    timed = min((by_part(engine, race, turn) for turn in range(repeats)), key=itemgetter("step_ms"))
    by_kind = by_operation(engine, race, subject.model.device)
    return {"sequences": race.num_sequences, **timed, **by_kind}


def by_part(engine: Engine, race: Race, turn: int) -> Figures:
    """Milliseconds of each part in a step, and the share of those that are not the model's own work."""
    speak = own.contender(engine, race)
    with watched(engine) as watch:
        speak(turn)
    steps = watch.calls["step"]
    seconds = {part: watch.seconds[part] for part in PARTS}
    total = sum(seconds.values())
    return {
        "steps": steps,
        "step_ms": 1000 * total / steps,
        "parts_ms": {part: 1000 * each / steps for part, each in seconds.items()},
        "share_outside_kernels": sum(each for part, each in seconds.items() if part not in KERNELS) / total,
    }


def by_operation(engine: Engine, race: Race, device: torch.device) -> Figures:
    """Shares of a run's time by kind of operation, and what it costs at least to call so many, of a step's time."""
    speak = own.contender(engine, race)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with watched(engine) as watch, profile(activities=activities) as profiler:
        seconds = speak(0).seconds
    operations = Counter[str]()
    for event in profiler.key_averages():
        operations[kind(event.key)] += event.self_cpu_time_total / 1e6
    shares = {name: operations[name] / seconds for name in (*KINDS, OTHERS)}
    calls = sum(event.cpu_parent is None for event in profiler.events()) / watch.calls["step"]
    return {
        "operation_shares": shares | {OUTSIDE: 1 - sum(shares.values())},
        "calls_per_step": calls,
        "least_call_ms": 1000 * calls * smallest_call_seconds(device),
    }


def kind(operation: str) -> str:
    """Of an operation as the profiler names it."""
    name = operation.removeprefix("aten::").lstrip("_")
    return next((kind for kind, parts in KINDS.items() if any(part in name for part in parts)), OTHERS)


def smallest_call_seconds(device: torch.device) -> float:
    """What Python and PyTorch take to do nothing to one number."""
    number = torch.zeros(1, device=device)
    started = time.perf_counter()
    for _ in range(NUM_SMALLEST_CALLS):
        number.neg_()
    return (time.perf_counter() - started) / NUM_SMALLEST_CALLS


def table(figures: Figures) -> Table:
    rows = figures["rows"]
    columns = (f"{row['sequences']} at once" for row in rows)
    result = Table("", *columns, caption=CAPTION)
    for part in rows[0]["parts_ms"]:
        result.add_row(part, *(f"{row['parts_ms'][part]:.3f}" for row in rows))
    result.add_row("whole step", *(f"{row['step_ms']:.3f}" for row in rows))
    outside = (f"{row['share_outside_kernels']:.1%}" for row in rows)
    result.add_row(f"all but {', '.join(KERNELS)}", *outside, end_section=True)
    for name in rows[0]["operation_shares"]:
        result.add_row(name, *(f"{row['operation_shares'][name]:.1%}" for row in rows))
    result.add_row("calls a step", *(f"{row['calls_per_step']:.0f}" for row in rows))
    result.add_row("ms to call them", *(f"{row['least_call_ms']:.3f}" for row in rows))
    return result
