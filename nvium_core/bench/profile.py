"""Profiles an engine: time in the model's kernels, and the host's overhead."""

import time
from collections.abc import Sequence
from operator import itemgetter

from rich.table import Table

from nvium_core.bench.contenders.contender import Workload
from nvium_core.bench.contenders.lineup import OURS, contender, engine_for, workloads
from nvium_core.bench.figures import Figures
from nvium_core.bench.harness import Subject, count
from nvium_core.engine.device.native.backend import NativeBackend
from nvium_core.engine.engine import Engine
from nvium_core.engine.sampling_params import SamplingParams


def measure(subject: Subject, *, sequences: Sequence[int] = (1,), tokens: int = 64, repeats: int = 3) -> Figures:
    """Measure the time per token by part, at each number of sequences, in the fastest of `repeats` runs."""
    rows = []
    for workload in workloads(subject, sequences, tokens):
        engine = engine_for(subject.model, workload)
        contender(engine, workload, OURS)(0)
        fastest = min((by_part(engine, workload, turn) for turn in range(repeats)), key=itemgetter("token_us"))
        rows.append({"sequences": workload.num_sequences, **fastest})
    return {"tokens": tokens, "rows": rows}


def by_part(engine: Engine, workload: Workload, turn: int) -> Figures:
    """Measure microseconds per token by part.

    layers: the forward pass. If native calls time routers and heads separately, `layers` excludes both.
    engine: all remaining time, such as scheduling, recording and calling the device.
    """
    for seed in workload.seeds(turn):
        params = SamplingParams(max_tokens=workload.num_tokens, seed=seed, ignore_eos=True)
        engine.add(str(seed), workload.prompt, params)
    before, layers, started = router_and_head_seconds(engine), 0.0, time.perf_counter()
    while engine.has_work:
        engine.step()
        layers += sum(report.seconds for report in engine.reports)
    total = time.perf_counter() - started
    after = router_and_head_seconds(engine)
    kernels = {"layers": layers} | {part: after[part] - seconds for part, seconds in before.items()}
    parts = {**kernels, "engine": total - sum(kernels.values())}
    num_tokens = workload.num_tokens * workload.num_sequences
    return {
        "token_us": 1e6 * total / num_tokens,
        "parts_us": {part: 1e6 * seconds / num_tokens for part, seconds in parts.items()},
        "share_outside_kernels": parts["engine"] / total,
    }


def router_and_head_seconds(engine: Engine) -> dict[str, float]:
    """Return the seconds that native calls have spent in routers and in heads. Empty without native calls."""
    backend = engine.runner.backend
    return backend.part_seconds if isinstance(backend, NativeBackend) else {}


def table(figures: Figures) -> Table:
    rows = figures["rows"]
    columns = (count(row["sequences"], "sequence") for row in rows)
    result = Table("", *columns, caption="Microseconds per token by part.")
    for part in rows[0]["parts_us"]:
        result.add_row(part, *(f"{row['parts_us'][part]:.1f}" for row in rows))
    result.add_row("all", *(f"{row['token_us']:.1f}" for row in rows))
    result.add_row("host overhead", *(f"{row['share_outside_kernels']:.1%}" for row in rows))
    return result
