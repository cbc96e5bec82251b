"""What the server's own histograms say of a run, beside what its clients saw: the two should agree."""

from collections import defaultdict
from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families

from loadtest.report import Report

HISTOGRAMS = ("time_to_first_token", "inter_token_latency")
"""Of the report, and as `nvium_…_seconds` of the server's metrics."""

TIMEOUT_SECONDS = 10

REPLICA = "replica"
"""The label that tells processes of one server apart."""

Totals = dict[str, float]
"""The sums and counts of the histograms, by the sample's name."""


@dataclass(frozen=True, slots=True)
class ServerView:
    """Sums and counts before and after a run. Requests of others in between are counted too."""

    before: Totals
    after: Totals

    def mean(self, name: str) -> float | None:
        """Seconds; None if the server observed nothing, does not tell, or was started anew."""
        seconds, count = (self._gained(f"nvium_{name}_seconds_{part}") for part in ("sum", "count"))
        return seconds / count if count > 0 else None

    def to_json(self, report: Report) -> dict[str, dict[str, float | None]]:
        """Means in seconds, the server's and the clients'."""
        return {name: {"server": self.mean(name), "client": client_mean(report, name)} for name in HISTOGRAMS}

    def _gained(self, sample: str) -> float:
        return self.after.get(sample, 0.0) - self.before.get(sample, 0.0)


async def totals(http: httpx.AsyncClient) -> Totals:
    """What `/metrics` says now, of all replicas together; nothing where there is none to be had."""
    try:
        response = (await http.get("/metrics", timeout=TIMEOUT_SECONDS)).raise_for_status()
        families = list(text_string_to_metric_families(response.text))
    except (httpx.HTTPError, ValueError):
        return {}
    found: defaultdict[str, float] = defaultdict(float)
    for sample in (sample for family in families for sample in family.samples):
        if sample.labels.keys() <= {REPLICA}:
            found[sample.name] += sample.value
    return dict(found)


def client_mean(report: Report, name: str) -> float | None:
    spread = getattr(report.latencies, name)
    return spread.mean if spread else None
