import io
import json

import pytest
from rich.console import Console

from loadtest.client import Arrival, Outcome
from loadtest.report import Report, Spread


def good(due: float) -> Outcome:
    arrivals = [Arrival(due + 0.1, 1), Arrival(due + 0.3, 2)]
    return Outcome(due=due, finished=due + 0.4, arrivals=arrivals, exits=[1, 3, 1], num_prompt_tokens=4)


FAILED = Outcome(due=0.0, finished=9.0, arrivals=[Arrival(5.0, 1)], error="ServerError: lost")


def test_percentiles_are_values_that_were_measured():
    spread = Spread.of([value / 100 for value in range(100, 0, -1)])
    assert spread == Spread(mean=pytest.approx(0.505), p50=0.5, p90=0.9, p99=0.99, max=1.0)


def test_one_value_is_every_percentile_and_none_is_no_spread():
    assert Spread.of([2.0]) == Spread(mean=2.0, p50=2.0, p90=2.0, p99=2.0, max=2.0)
    assert Spread.of([]) is None


def test_a_report_sums_up_the_outcomes():
    report = Report.of([good(0.0), good(1.6)])
    assert report.duration == pytest.approx(2.0)
    assert report.tokens_per_second == pytest.approx(3.0)
    assert report.requests_per_second == pytest.approx(1.0)
    assert report.exits == {1: 4, 3: 2}
    assert report.num_prompt_tokens == 8
    assert report.time_to_first_token is not None
    assert report.time_to_first_token.mean == pytest.approx(0.1)
    assert report.inter_token_latency is not None
    assert report.inter_token_latency.max == pytest.approx(0.1)


def test_failed_requests_count_as_errors_and_not_in_latencies():
    report = Report.of([good(0.0), FAILED, FAILED])
    assert (report.num_succeeded, report.num_failed) == (1, 2)
    assert report.errors == {"ServerError: lost": 2}
    assert report.latency is not None
    assert report.latency.max == pytest.approx(0.4)


def test_nothing_at_all_is_still_a_report():
    report = Report.of([])
    assert report.latency is None
    assert report.tokens_per_second == report.requests_per_second == 0.0


def test_the_json_can_be_written_and_holds_the_rates():
    read = json.loads(json.dumps(Report.of([good(0.0), FAILED]).to_json()))
    assert read["exits"] == {"1": 2, "3": 1}
    assert read["tokens_per_second"] == pytest.approx(4 / 9)
    assert read["num_failed"] == 1


def test_the_tables_show_latencies_exits_and_errors():
    shown = io.StringIO()
    Console(file=shown, width=100).print(*Report.of([good(0.0), FAILED]).tables())
    assert "time to first token" in shown.getvalue()
    assert "100.0" in shown.getvalue()
    assert "66.7%" in shown.getvalue()
    assert "ServerError: lost" in shown.getvalue()
