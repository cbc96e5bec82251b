"""What the server's own histograms say of a run, beside what its clients saw: the two should agree."""

from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families
from rich.table import Table

from loadtest.report import Report

HISTOGRAMS = ("time_to_first_token", "inter_token_latency")
"""Of the report, and as `nvium_…_seconds` of the server's metrics."""

Totals = dict[str, float]
"""The sums and counts of the histograms, by the sample's name."""


@dataclass(frozen=True, slots=True)
class ServerView:
    """Sums and counts before and after a run. Requests of others in between are counted too."""

    before: Totals
    after: Totals

    def mean(self, name: str) -> float | None:
        """Seconds; None if the server observed nothing, or does not tell."""
        seconds, count = (self._gained(f"nvium_{name}_seconds_{part}") for part in ("sum", "count"))
        return seconds / count if count else None

    def to_json(self, report: Report) -> dict[str, dict[str, float | None]]:
        """Means in seconds, the server's and the clients'."""
        return {name: {"server": self.mean(name), "client": client_mean(report, name)} for name in HISTOGRAMS}

    def table(self, report: Report) -> Table:
        result = Table("mean, milliseconds", "clients", "server")
        for name, means in self.to_json(report).items():
            values = [f"{1000 * value:.2f}" if value is not None else "" for value in means.values()]
            result.add_row(name.replace("_", " "), *reversed(values))
        return result

    def _gained(self, sample: str) -> float:
        return self.after.get(sample, 0.0) - self.before.get(sample, 0.0)


async def totals(http: httpx.AsyncClient) -> Totals:
    """What `/metrics` says now; nothing where there is none to be had."""
    try:
        response = (await http.get("/metrics")).raise_for_status()
    except httpx.HTTPError:
        return {}
    families = text_string_to_metric_families(response.text)
    return {sample.name: sample.value for family in families for sample in family.samples if not sample.labels}


def client_mean(report: Report, name: str) -> float | None:
    spread = getattr(report, name)
    return spread.mean if spread else None
