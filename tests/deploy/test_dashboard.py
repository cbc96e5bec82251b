from tests.deploy.promql import selectors
from tests.deploy.shipped import RULES, panel_queries

QUERIES = [target["expr"] for _, target in panel_queries()]


def test_panels_use_only_metrics_that_a_server_exports(page):
    assert {query: page.complaints(query) for query in QUERIES if page.complaints(query)} == {}


def test_every_metric_is_on_the_dashboard_or_in_a_rule(page):
    queries = [*QUERIES, *(rule["expr"] for rule in RULES)]
    asked = {page.family_of(selector.name) for query in queries for selector in selectors(query)}
    assert page.families.keys() - asked == set()
