import re
from itertools import combinations

import pytest
from promql_parser import AggregateExpr

from deploy.monitoring import dashboard
from tests.deploy.promql import Page, nodes, selectors
from tests.deploy.shipped import MONITORING, RULES, panel_queries, panels

QUERIES = [target["expr"] for _, target in panel_queries()]


def test_the_dashboard_is_what_its_source_writes():
    assert (MONITORING / "nvium.json").read_text() == dashboard.text()


@pytest.mark.parametrize("query", QUERIES)
def test_a_panel_asks_for_nothing_that_a_server_does_not_tell(query: str, page: Page):
    assert page.complaints(query) == []


@pytest.mark.parametrize(
    ("query", "complaint"),
    [
        ("nvium_request_running", "metric nvium_request_running"),
        ("rate(nvium_step_seconds[1m])", "metric nvium_step_seconds"),
        ('nvium_requests_total{result="failed"}', "label result of nvium_requests_total"),
        ('nvium_requests_total{outcome="error"}', "value error of outcome of nvium_requests_total"),
        ('nvium_rejected_total{reason="full"}', "value full of reason of nvium_rejected_total"),
        ("sum by (layer) (rate(nvium_steps_total[1m]))", "label layer of nvium_steps_total"),
        ("sum without (layer) (rate(nvium_steps_total[1m]))", "label layer of nvium_steps_total"),
        ("histogram_quantile(.5, sum by (le) (rate(nvium_steps_total[1m])))", "label le of nvium_steps_total"),
        ("vector(1) and avg_over_time((nvium_speedup >= 0)[1h:])", "metric nvium_speedup"),
    ],
)
def test_a_renamed_metric_label_or_value_is_found(query: str, complaint: str, page: Page):
    assert page.complaints(query) == [complaint]


def test_every_metric_of_the_server_is_shown_or_watched(page: Page):
    queries = [*QUERIES, *(rule["expr"] for rule in RULES)]
    asked = {page.family_of(selector.name) for query in queries for selector in selectors(query)}
    assert page.families.keys() - asked == set()


@pytest.mark.parametrize(("title", "target"), [pytest.param(*both, id=both[1]["expr"]) for both in panel_queries()])
def test_lines_are_named_by_labels_that_their_queries_keep(title: str, target: dict[str, str]):
    sums = [node for node in nodes(target["expr"]) if isinstance(node, AggregateExpr)]
    kept = {label for node in sums if node.modifier for label in node.modifier.labels} if sums else {"instance"}
    assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= kept, title


def test_panels_have_ids_of_their_own_and_do_not_cover_each_other():
    ids = [panel["id"] for panel in panels()]
    assert len(ids) == len(set(ids))
    for one, other in combinations((panel["gridPos"] for panel in panels()), 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        above = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or above
