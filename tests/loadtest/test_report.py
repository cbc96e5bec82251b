import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.client import Arrival, RequestResult
from loadtest.prompts import WorkloadError
from loadtest.report import Report, Spread, Targets


def good(due: float, **others: Any) -> RequestResult:
    """First token after 0.1 s, then 0.1 s between tokens."""
    arrivals = [Arrival(due + 0.1, 1), Arrival(due + 0.3, 2)]
    return RequestResult(
        due=due, sent=due, finished=due + 0.4, arrivals=arrivals, exits=[1, 3, 1], num_prompt_tokens=4, **others
    )


FAILED = RequestResult(due=0.0, finished=9.0, arrivals=[Arrival(0.01, 1)], error="error in stream", message="lost")


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
    assert report.latencies.time_to_first_token is not None
    assert report.latencies.time_to_first_token.mean == pytest.approx(0.1)
    assert report.latencies.inter_token_latency is not None
    assert report.latencies.inter_token_latency.max == pytest.approx(0.1)


def test_failed_requests_count_as_errors_and_not_in_latencies():
    report = Report.of([good(0.0), FAILED, FAILED])
    assert (report.num_succeeded, report.num_failed) == (1, 2)
    assert report.errors == {"error in stream": 2}
    assert report.messages == {"error in stream": "lost"}
    assert report.latencies.latency is not None
    assert report.latencies.latency.max == pytest.approx(0.4)
    assert report.latencies.time_to_first_token is not None
    assert report.latencies.time_to_first_token.mean == pytest.approx(0.1)


def test_nothing_at_all_is_still_a_report():
    report = Report.of([])
    assert report.latencies.latency is None
    assert report.tokens_per_second == report.requests_per_second == 0.0


def test_the_json_can_be_written_and_holds_the_rates():
    read = json.loads(json.dumps(Report.of([good(0.0), FAILED]).to_json()))
    assert read["exits"] == {"1": 2, "3": 1}
    assert read["tokens_per_second"] == pytest.approx(4 / 9)
    assert read["num_failed"] == 1


@given(st.lists(st.floats(0, 1e6), min_size=1))
def test_so_many_percent_do_not_exceed_a_percentile_and_fewer_are_below_it(values: list[float]):
    spread = Spread.of(values)
    assert spread is not None
    for share, percentile in ((0.5, spread.p50), (0.9, spread.p90), (0.99, spread.p99)):
        assert sum(value <= percentile for value in values) >= math.floor(share * len(values))
        assert sum(value < percentile for value in values) <= share * len(values)
    assert spread.p50 <= spread.p90 <= spread.p99 <= spread.max == max(values)


@pytest.mark.parametrize(
    ("first", "between", "num_good"),
    [
        (None, None, None),
        (0.11, None, 2),
        (0.09, None, 0),
        (None, 0.11, 2),
        (None, 0.09, 0),
        (0.11, 0.11, 2),
        (0.11, 0.09, 0),
    ],
)
def test_good_requests_meet_every_stated_target(first, between, num_good):
    targets = Targets(time_to_first_token=first, inter_token_latency=between)
    report = Report.of([good(0.0), FAILED, good(1.6)], targets)
    assert report.num_good == num_good
    assert report.goodput == (None if num_good is None else pytest.approx(num_good / 9))


def test_a_request_that_failed_fast_is_not_good():
    assert Report.of([FAILED], Targets(time_to_first_token=1.0)).goodput == 0.0


def test_one_token_has_nothing_between_tokens_to_be_late():
    result = RequestResult(due=0.0, finished=1.0, arrivals=[Arrival(0.5, 1)])
    assert Targets(inter_token_latency=0.001).are_met_by(result)


def test_an_answer_of_which_no_token_was_seen_meets_no_target():
    assert not Targets(inter_token_latency=1.0).are_met_by(RequestResult(due=0.0, finished=1.0, num_reported_tokens=1))


@pytest.mark.parametrize("target", [0.0, -1.0, math.inf, math.nan])
def test_a_target_that_makes_no_sense_is_refused(target):
    with pytest.raises(WorkloadError):
        Targets(time_to_first_token=target)


def test_categories_have_latencies_of_their_own():
    report = Report.of([good(0.0, category="qa"), good(0.5, category="qa"), good(0.0, category="rag"), good(0.0)])
    assert {name: found.num_requests for name, found in report.categories.items()} == {"qa": 2, "rag": 1}


def test_lateness_is_what_passed_between_due_and_sent():
    report = Report.of([RequestResult(due=1.0, sent=1.25, finished=2.0)])
    assert report.lateness is not None
    assert report.lateness.max == 0.25
