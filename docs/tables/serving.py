"""Figures over HTTP: overhead, replicas, forecasts, attacks, other load tests."""

from typing import Any

from docs.tables.table import Table, digits, percent, read, table

GUIDELLM = {
    "first token, ms": "first_token_ms",
    "between tokens, ms": "next_token_ms",
    "tokens/s": "tokens_per_second",
}
FORECASTS = {
    "forecast-short-tales-6m": "rates 6 to 60, fitted",
    "forecast-again-tales-6m": "rates 8 to 45",
    "forecast-long-tales-6m": "long prompts, rates 3 to 20",
}


@table
def overhead() -> Table:
    head = ["streams", "engine in", "tokens/s over HTTP", "in-process", "share", "event loop, µs a token"]
    runs = {"a thread": "overhead-tales-6m", "a process": "overhead-process-tales-6m"}
    return head, [
        [
            streams,
            where,
            digits(of["server"]["tokens_per_second"]),
            digits(of["engine"]["tokens_per_second"]),
            of["server"]["share"],
            digits(of["server"]["event_loop_us_per_token"]),
        ]
        for where, name in runs.items()
        for streams, of in by_streams(name).items()
    ]


@table
def replicas() -> Table:
    head = [
        "streams",
        "single server, tokens/s",
        "one replica",
        "two",
        "gateway, µs a token",
        "single server, µs a token",
    ]
    return head, [
        [
            streams,
            digits(of["single"]["tokens_per_second"]),
            of["one"]["share"],
            of["two"]["share"],
            digits(of["one"]["first_process_us_per_token"]),
            digits(of["single"]["processor_us_per_token"]),
        ]
        for streams, of in by_streams("replicas-tales-6m").items()
    ]


def by_streams(name: str) -> dict[int, dict[str, Any]]:
    """Rows of `loadtest.overhead`, by streams and server."""
    found: dict[int, dict[str, Any]] = {}
    for row in read(name)["rows"]:
        found.setdefault(row["streams"], {})[row["server"]] = row
    return found


@table
def affinity() -> Table:
    rows = read("replicas-affinity-tales-6m")["rows"]
    return ["", "prompt tokens found in the cache"], [[row["server"], percent(row["hit_share"])] for row in rows]


@table
def forecast() -> Table:
    head = [
        "load test",
        "planned over measured",
        "median difference",
        "at most 15% apart",
        "saturated at, planned",
        "measured, requests/s",
    ]
    return head, [forecast_row(name, words) for name, words in FORECASTS.items()]


def forecast_row(name: str, words: str) -> list[str]:
    loads = read(name)["loads"]
    ratios = [ratio for load in loads for ratio in compared(load)]
    distances = sorted(abs(ratio - 1) for ratio in ratios)
    near = sum(distance <= 0.15 for distance in distances)
    full = [load for load in loads if load["is_saturated"]][-1]
    saturated = [digits(full[side]["answered_per_second"], 1) for side in ("planned", "measured")]
    link = f"{words} ([{name.removesuffix('-tales-6m')}](../benchmarks/{name}.json))"
    half = percent(distances[len(distances) // 2], 0)
    return [link, f"{min(ratios):.2f} to {max(ratios):.2f}", half, f"{near} of {len(ratios)}", *saturated]


def compared(load: Any) -> list[float]:
    """Beyond saturation waits sum up every difference, so only gaps and answers per second are compared."""
    ratios = load["planned_over_measured"]
    waits = () if load["is_saturated"] else ("first_token", "total")
    return [
        ratios["answered_per_second"],
        *(ratio for part in ("between_tokens", *waits) for ratio in ratios[part].values()),
    ]


@table
def hostile() -> Table:
    head = ["attack", "answered", "seconds", "gap before, ms", "gap during, ms", "memory, MB"]
    return head, [
        [
            attack["attack"],
            ", ".join(kind if count == 1 else f"{kind} × {count}" for kind, count in attack["statuses"].items()),
            digits(attack["seconds"], 1),
            gaps(attack["before"]),
            gaps(attack["during"]),
            digits(attack["grown_mb"]),
        ]
        for attack in read("hostile-tales-6m")["attacks"]
    ]


def gaps(figures: dict[str, float | None]) -> str:
    """Median / worst."""
    return f"{figures['median_gap_ms'] or 0:.1f} / {figures['worst_gap_ms'] or 0:.0f}"


@table
def guidellm() -> Table:
    [run] = [run for run in read("guidellm-tales-6m") if run["program"] == "guidellm beside loadtest"]
    figures = run["figures"]
    head = ["mean of a test", "loadtest", f"guidellm {run['version']}", "loadtest over guidellm", "of the six turns"]
    return head, [
        [
            words,
            digits(figures[f"{key}_by_loadtest"], 1),
            digits(figures[f"{key}_by_guidellm"], 1),
            digits(figures[f"{key}_ratio"], 3),
            figures[f"{key}_ratios"],
        ]
        for words, key in GUIDELLM.items()
    ]
