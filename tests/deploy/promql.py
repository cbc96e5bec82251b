"""Checks that PromQL queries use only the metrics and labels of a server's `/metrics` page."""

from collections import defaultdict
from collections.abc import Iterator

import promql_parser
from prometheus_client.parser import text_string_to_metric_families
from promql_parser import AggModifierType, AggregateExpr, Expr, MatchOp, VectorSelector

TARGET_LABELS = {"instance", "job", "namespace", "pod"}
"""Labels that Prometheus adds to scraped metrics. It adds the last two in Kubernetes only."""

LABEL = "replica"
"""The label that a gateway adds."""

Labels = dict[str, set[str]]
"""The values of each label."""


class Page:
    def __init__(self, text: str) -> None:
        self.series: dict[str, Labels] = {"up": {}}
        self.families = {family.name: family for family in text_string_to_metric_families(text)}
        for family in self.families.values():
            for sample in family.samples:
                labels = self.series.setdefault(sample.name, defaultdict(set))
                for name, value in sample.labels.items():
                    labels[name].add(value)

    def family_of(self, series: str) -> str | None:
        """Return the metric of a series, such as the histogram of a bucket."""
        samples = ((family.name, sample.name) for family in self.families.values() for sample in family.samples)
        return next((name for name, sample in samples if sample == series), None)

    def complaints(self, query: str) -> list[str]:
        """Return what a query uses but the page does not have."""
        return [complaint for node in nodes(query) for complaint in self._of_node(node)]

    def _of_node(self, node: Expr) -> Iterator[str]:
        if isinstance(node, VectorSelector):
            yield from self._of_selector(node)
        if isinstance(node, AggregateExpr) and node.modifier:
            groups_by = node.modifier.type == AggModifierType.By
            known = TARGET_LABELS if groups_by else {LABEL}
            for selector in selectors(node):
                labels = known | self.series.get(selector.name, {}).keys()
                yield from (f"label {name} of {selector.name}" for name in node.modifier.labels if name not in labels)

    def _of_selector(self, selector: VectorSelector) -> Iterator[str]:
        labels = self.series.get(selector.name)
        if labels is None:
            yield f"metric {selector.name}"
            return
        for matcher in selector.matchers.matchers:
            if matcher.name in TARGET_LABELS:
                continue
            if matcher.name not in labels:
                yield f"label {matcher.name} of {selector.name}"
            elif matcher.op == MatchOp.Equal and matcher.value not in labels[matcher.name]:
                yield f"value {matcher.value} of {matcher.name} of {selector.name}"


def nodes(query: str | Expr) -> list[Expr]:
    found: list[Expr] = []
    promql_parser.walk(promql_parser.parse(query) if isinstance(query, str) else query, pre_visit=found.append)
    return found


def selectors(query: str | Expr) -> list[VectorSelector]:
    return [node for node in nodes(query) if isinstance(node, VectorSelector)]
