"""Where a Step's time goes, by the parts that the engine times itself; they add up to the whole. On a GPU the times are
the host's, and what its kernels and copies take stands beside them."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any

import torch
from rich.table import Table

from nvium_core.bench.contenders import own
from nvium_core.bench.contenders.contender import Race
from nvium_core.bench.harness import Figures, Subject
from nvium_core.engine.engine import Engine
from nvium_core.engine.params import SamplingParams, require

KERNELS = ("layers", "router", "head")
"""The model's own work: attention is part of the layers, draws of the head. The rest is host overhead."""

PROFILED_TOKENS = 32
"""Of each sequence: every kernel is written down."""


def measure(subject: Subject, *, sequences: Sequence[int] = (1,), tokens: int = 64, repeats: int = 3) -> Figures:
    """A row for each number of sequences, of `tokens` tokens each; the fastest of the runs."""
    room = subject.context - len(subject.prompt)
    require(tokens <= room, "tokens", f"after the prompt there is room for {room}, got {tokens}")
    races = [Race(prompt=subject.prompt, num_sequences=number, num_tokens=tokens) for number in sequences]
    return {"tokens": tokens, "rows": [dissect(subject, race, repeats) for race in races]}


def dissect(subject: Subject, race: Race, repeats: int) -> Figures:
    engine = own.engine_for(subject.model, race)
    engine.calibrate()
    run(engine, race, 0)
    fastest = min((by_part(engine, race, turn) for turn in range(repeats)), key=itemgetter("step_ms"))
    return {"sequences": race.num_sequences, **fastest, "device_ms": device_ms(engine, race)}


def device_ms(engine: Engine, race: Race) -> float:
    """Of kernels and copies, per step(); 0 on a CPU."""
    with torch.profiler.profile() as seen:
        steps, _, _ = run(engine, replace(race, num_tokens=min(race.num_tokens, PROFILED_TOKENS)), turn=0)
    return device_microseconds(seen.key_averages()) / 1000 / steps


def device_microseconds(events: Iterable[Any]) -> float:
    """Of a profile's kernels and copies. The operators that launched them name the same times again."""
    return sum(
        each.self_device_time_total for each in events if each.device_type.name != "CPU" and not each.is_user_annotation
    )


def by_part(engine: Engine, race: Race, turn: int) -> Figures:
    """Milliseconds of each part per step(), and the share outside the model's own work. `runner` is the rest of the
    runner's time, `engine` the remainder: scheduling, recording, reporting."""
    before = engine.runner.part_seconds
    steps, total, in_runner = run(engine, race, turn)
    kernels = {part: seconds - before[part] for part, seconds in engine.runner.part_seconds.items()}
    parts = {**kernels, "runner": in_runner - sum(kernels.values()), "engine": total - in_runner}
    return {
        "steps": steps,
        "step_ms": 1000 * total / steps,
        "parts_ms": {part: 1000 * seconds / steps for part, seconds in parts.items()},
        "share_outside_kernels": 1 - sum(kernels.values()) / total,
    }


def run(engine: Engine, race: Race, turn: int) -> tuple[int, float, float]:
    """Calls of step(), their seconds, and the runner's seconds among them."""
    engine.scheduler.policy.wait()
    for seed in race.seeds(turn):
        engine.add(str(seed), race.prompt, SamplingParams(max_tokens=race.num_tokens, seed=seed, ignore_eos=True))
    steps, total, in_runner = 0, 0.0, 0.0
    while engine.has_work:
        started = time.perf_counter()
        engine.step()
        total += time.perf_counter() - started
        in_runner += engine.runner_seconds
        steps += 1
    return steps, total, in_runner


def table(figures: Figures) -> Table:
    rows = figures["rows"]
    columns = (f"{row['sequences']} at once" for row in rows)
    result = Table("", *columns, caption="Milliseconds of a step by part.")
    for part in rows[0]["parts_ms"]:
        result.add_row(part, *(f"{row['parts_ms'][part]:.3f}" for row in rows))
    result.add_row("whole step", *(f"{row['step_ms']:.3f}" for row in rows))
    if any(row["device_ms"] for row in rows):
        result.add_row("on the device", *(f"{row['device_ms']:.3f}" for row in rows))
    outside = (f"{row['share_outside_kernels']:.1%}" for row in rows)
    result.add_row(f"all but {', '.join(KERNELS)}", *outside)
    return result
