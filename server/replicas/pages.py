"""Merges metrics pages: each sample gets a label with its replica's name. Knows no network."""

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

LABEL = "replica"


def merged(pages: Mapping[str, str]) -> bytes:
    """One page from pages by replica name."""
    registry = CollectorRegistry()
    registry.register(Families(pages))
    return generate_latest(registry)


class Families(Collector):
    def __init__(self, pages: Mapping[str, str]) -> None:
        self._pages = pages

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for replica, page in self._pages.items():
            for family in labelled(text_string_to_metric_families(page), replica):
                families.setdefault(family.name, family)
                if families[family.name] is not family:
                    families[family.name].samples += family.samples
        yield from families.values()

    def describe(self) -> Iterable[Metric]:
        """Nothing, as the metrics depend on the replicas."""
        return ()


def labelled(families: Iterable[Metric], replica: str) -> Iterator[Metric]:
    for family in families:
        family.samples = [sample._replace(labels={**sample.labels, LABEL: replica}) for sample in family.samples]
        yield family
