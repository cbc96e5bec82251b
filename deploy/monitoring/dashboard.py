"""The Grafana dashboard, panel by panel. Knows Grafana's JSON and PromQL, and nothing of nvium's code.

    python deploy/monitoring/dashboard.py

writes nvium.json beside this file; a test checks that they agree.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent / "nvium.json"

DATA_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
SCREEN_WIDTH = 24
"""Grafana's, in columns."""

HERE = '{instance=~"$instance"}'
PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True)
class Panel:
    """A chart of queries, each with its legend. `height` is in Grafana's rows of 30 pixels."""

    title: str
    about: str
    queries: Sequence[tuple[str, str]]
    unit: str = "short"
    kind: str = "timeseries"
    stacked: bool = False
    minimum: float | None = 0
    maximum: float | None = None
    height: int = 8

    def json(self) -> dict[str, Any]:
        """Without id and position, which depend on its neighbours."""
        defaults: dict[str, Any] = {"unit": self.unit, "custom": self._lines()} | self._bounds()
        return {
            "type": self.kind,
            "title": self.title,
            "description": self.about,
            "datasource": DATA_SOURCE,
            "fieldConfig": {"defaults": defaults, "overrides": []},
            "options": self._options(),
            "targets": [
                {"refId": chr(ord("A") + number), "datasource": DATA_SOURCE, "expr": query, "legendFormat": legend}
                for number, (query, legend) in enumerate(self.queries)
            ],
        }

    def _lines(self) -> dict[str, Any]:
        if self.kind == "stat":
            return {}
        stacking = {"stacking": {"mode": "normal"}, "fillOpacity": 50} if self.stacked else {"fillOpacity": 8}
        return {"lineWidth": 1, "showPoints": "never", **stacking}

    def _bounds(self) -> dict[str, float]:
        return {name: value for name, value in (("min", self.minimum), ("max", self.maximum)) if value is not None}

    def _options(self) -> dict[str, Any]:
        if self.kind == "stat":
            return {"graphMode": "area", "colorMode": "none", "reduceOptions": {"calcs": ["lastNotNull"]}}
        return {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi", "sort": "desc"}}


def growth(metric: str, *, by: str = "", where: str = "") -> str:
    """A counter's rate per second, over the selected instances."""
    matchers = ", ".join(part for part in ('instance=~"$instance"', where) if part)
    total = f"sum by ({by})" if by else "sum"
    return f"{total} (rate({metric}{{{matchers}}}[$__rate_interval]))"


def mean(histogram: str, *, by: str = "") -> str:
    return f"{growth(f'{histogram}_sum', by=by)} / {growth(f'{histogram}_count', by=by)}"


def percentile(histogram: str, percent: int) -> str:
    return f"histogram_quantile({percent / 100}, {growth(f'{histogram}_bucket', by='le')})"


def latency(title: str, about: str, histogram: str) -> Panel:
    queries = [(percentile(histogram, percent), f"p{percent}") for percent in PERCENTILES]
    return Panel(title, about, [*queries, (mean(histogram), "mean")], unit="s")


def lengths(title: str, about: str, histogram: str) -> Panel:
    queries = [(percentile(histogram, percent), f"p{percent}") for percent in (50, 95)]
    return Panel(title, about, [*queries, (mean(histogram), "mean")])


def figure(title: str, about: str, query: str, unit: str) -> Panel:
    """One number, with its history behind it."""
    return Panel(title, about, [(query, "")], unit=unit, kind="stat", height=4)


TOKENS = "nvium_generated_tokens_total"
DEPTH = mean("nvium_exit_depth_ratio")
SPEEDUP = f"nvium_piggyback_speedup_ratio{HERE}"

ROWS: dict[str, list[Panel]] = {
    "At a glance": [
        figure("Tokens", "Emitted per second, over all instances.", growth(TOKENS), "short"),
        figure(
            "First token, p95",
            "19 of 20 requests had their first token sooner.",
            percentile("nvium_time_to_first_token_seconds", 95),
            "s",
        ),
        figure("Waiting", "Sequences that wait to run.", f"sum(nvium_requests_waiting{HERE})", "short"),
        figure(
            "Failed",
            "Requests per second that ended in an error.",
            growth("nvium_requests_total", where='outcome="failed"'),
            "reqps",
        ),
        figure("Mean depth", "Of the exits that spoke; 100% is the dense model's.", DEPTH, "percentunit"),
        figure("Speed-up", "Over the dense schedule; 1 is none.", f"avg({SPEEDUP} >= 0)", "short"),
    ],
    "Latency": [
        latency("First token", "From a request's arrival to its first token.", "nvium_time_to_first_token_seconds"),
        latency("Between tokens", "Of one choice.", "nvium_inter_token_latency_seconds"),
        latency("Whole request", "Of completed requests, from arrival to end.", "nvium_request_latency_seconds"),
        latency("Queue", "From submission until a choice begins to run.", "nvium_queue_seconds"),
    ],
    "Requests": [
        Panel(
            "Running and waiting",
            "Sequences, one for each choice of a request.",
            [
                (f"sum(nvium_requests_running{HERE})", "running"),
                (f"sum(nvium_requests_waiting{HERE})", "waiting"),
                (f"sum(nvium_seats{HERE})", "seats"),
            ],
        ),
        Panel(
            "How requests end",
            "`failed` is ours to mend, `invalid` the client's; `cancelled` means that the client went away.",
            [(growth("nvium_requests_total", by="outcome"), "{{outcome}}")],
            unit="reqps",
            stacked=True,
        ),
        Panel(
            "Rejected",
            "Requests turned away, by reason; those of connections are not among the requests beside.",
            [(growth("nvium_rejected_total", by="reason"), "{{reason}}")],
            unit="reqps",
            stacked=True,
        ),
        Panel(
            "Lost replicas",
            "Requests per second that were begun anew elsewhere, and streams that broke off.",
            [
                (growth("nvium_moved_requests_total"), "begun anew"),
                (growth("nvium_broken_streams_total"), "broken off"),
            ],
            unit="reqps",
        ),
    ],
    "Answers": [
        Panel(
            "By status",
            "Answers per second; 499 is of those whose client had gone.",
            [(growth("nvium_responses_total", by="status"), "{{status}}")],
            unit="reqps",
            stacked=True,
        ),
        Panel(
            "Why choices end",
            "Per second: `stop` by themselves, `length` at the bound that was asked for, or when their time was over.",
            [(growth("nvium_finished_choices_total", by="finish_reason"), "{{finish_reason}}")],
            stacked=True,
        ),
        lengths("Tokens of prompts", "Of completed requests.", "nvium_request_prompt_tokens"),
        lengths("Tokens of answers", "Of all choices of a completed request.", "nvium_request_generated_tokens"),
    ],
    "Exits": [
        Panel(
            "Tokens by exit",
            "Emitted per second; exit 1 is the shallowest.",
            [(growth(TOKENS, by="exit"), "exit {{exit}}")],
            stacked=True,
        ),
        Panel(
            "Mean depth",
            "Layers below the exits that spoke, as a share of all layers.",
            [(DEPTH, "depth")],
            unit="percentunit",
            maximum=1,
        ),
        Panel(
            "Piggyback speed-up",
            "Time the same tokens would have taken block by block at full depth, over time spent, in the last minute.",
            [(SPEEDUP, "{{instance}}"), ("vector(1)", "dense")],
            minimum=None,
        ),
    ],
    "Steps": [
        Panel(
            "Rows per step",
            "Mean rows that a Step takes through a block, piggybacked ones included.",
            [(mean("nvium_step_rows", by="block"), "block {{block}}")],
        ),
        Panel(
            "Time per step",
            "Mean time of a Step.",
            [(mean("nvium_step_seconds", by="block"), "block {{block}}")],
            unit="s",
        ),
        Panel(
            "Steps",
            "Per second. Upper blocks run less often where tokens leave early.",
            [(growth("nvium_steps_total", by="block"), "block {{block}}")],
        ),
        Panel(
            "Deferred rows",
            "Rows whose upper blocks are put off, to be carried by later tokens.",
            [(f"sum(nvium_deferred_rows{HERE})", "deferred")],
        ),
    ],
    "Cache": [
        Panel(
            "Pages used",
            "Share of the key/value cache's pages.",
            [(f"nvium_kv_cache_usage_ratio{HERE}", "{{instance}}")],
            unit="percentunit",
            maximum=1,
        ),
        Panel(
            "Prompt tokens and prefix hits",
            "Per second, when asked for and when found. A prompt is found again for each choice and after preemption.",
            [
                (growth("nvium_prompt_tokens_total"), "prompt tokens"),
                (growth("nvium_cached_prompt_tokens_total"), "found in the cache"),
            ],
        ),
        Panel(
            "Drafts",
            "Tokens per second that early exits drafted for the last one, and those of them that were emitted.",
            [
                (growth("nvium_draft_tokens_total"), "drafted"),
                (growth("nvium_accepted_draft_tokens_total"), "emitted"),
            ],
        ),
        Panel(
            "Preemptions",
            "Sequences per second that lost their pages to others and start again.",
            [(growth("nvium_preemptions_total"), "preemptions")],
        ),
        Panel(
            "Log lines dropped",
            "Per second, because the log could not be written: a full disk, or a reader that is gone.",
            [(growth("nvium_dropped_log_lines_total"), "dropped")],
        ),
    ],
    "Processes": [
        Panel("Served", "Servers by model.", [(f"sum by (model_name) (nvium_model_info{HERE})", "{{model_name}}")]),
        Panel("Versions", "Processes by version.", [(f"sum by (version) (nvium_build_info{HERE})", "{{version}}")]),
        Panel("Up for", "", [(f"time() - process_start_time_seconds{HERE}", "{{instance}}")], unit="s"),
        Panel("Cores used", "", [(growth("process_cpu_seconds_total", by="instance"), "{{instance}}")]),
        Panel(
            "Memory",
            "Resident, and all that is mapped.",
            [
                (f"process_resident_memory_bytes{HERE}", "{{instance}} resident"),
                (f"process_virtual_memory_bytes{HERE}", "{{instance}} mapped"),
            ],
            unit="bytes",
        ),
        Panel(
            "Open files",
            "A connection is one.",
            [
                (f"process_open_fds{HERE}", "{{instance}} open"),
                (f"process_max_fds{HERE}", "{{instance}} allowed"),
            ],
        ),
    ],
}


def placed(rows: dict[str, list[Panel]]) -> Iterator[dict[str, Any]]:
    """Panels of a row share its width."""
    heights = [1 + panels[0].height for panels in rows.values()]
    tops = accumulate(heights, initial=0)
    for (title, panels), top in zip(rows.items(), tops, strict=False):
        yield {"type": "row", "title": title, "panels": [], "gridPos": {"x": 0, "y": top, "w": SCREEN_WIDTH, "h": 1}}
        width = SCREEN_WIDTH // len(panels)
        for number, panel in enumerate(panels):
            place = {"x": number * width, "y": top + 1, "w": width, "h": panel.height}
            yield panel.json() | {"gridPos": place}


def variables() -> list[dict[str, Any]]:
    """The data source, and the servers shown."""
    choice: dict[str, Any] = {
        "name": "instance",
        "type": "query",
        "datasource": DATA_SOURCE,
        "query": "label_values(nvium_requests_running, instance)",
        "refresh": 2,
        "multi": True,
        "includeAll": True,  # of those that this query finds: `.*` would take other programs' process_… too
        "current": {"text": "All", "value": "$__all"},
    }
    return [{"name": "datasource", "type": "datasource", "query": "prometheus"}, choice]


def dashboard() -> dict[str, Any]:
    return {
        "uid": "nvium",
        "title": "nvium",
        "tags": ["nvium"],
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": variables()},
        "panels": [{"id": number, **panel} for number, panel in enumerate(placed(ROWS), start=1)],
    }


def text() -> str:
    return json.dumps(dashboard(), indent=2) + "\n"


if __name__ == "__main__":
    FILE.write_text(text())
