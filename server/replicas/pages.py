"""Merges the replicas' Prometheus pages. Each sample gets a label with its replica's name."""

from collections.abc import Iterator, Mapping

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

LABEL = "replica"


class MergedPages(Collector):
    """The merged metrics. `pages` maps a replica's name to its page."""

    def __init__(self, pages: Mapping[str, str]) -> None:
        self._pages = pages

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for replica, page in self._pages.items():
            for family in text_string_to_metric_families(page):
                samples = [sample._replace(labels={**sample.labels, LABEL: replica}) for sample in family.samples]
                if family.name in families:
                    families[family.name].samples += samples
                else:
                    family.samples = samples
                    families[family.name] = family
        yield from families.values()
