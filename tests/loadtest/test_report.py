import io
import json

import pytest
from rich.console import Console

from loadtest.client import Arrival, RequestResult
from loadtest.report import Point, report, table
from loadtest.workload import Workload


def good(due: float) -> RequestResult:
    """A successful request: first token after 0.1 s, then 0.1 s between tokens."""
    arrivals = [Arrival(due + 0.1, 1), Arrival(due + 0.3, 2)]
    return RequestResult(due=due, finished=due + 0.4, arrivals=arrivals, exits=[1, 3, 1], num_prompt_tokens=4)


FAILED = RequestResult(due=0.0, finished=9.0, arrivals=[Arrival(0.01, 1)], error="error in stream", message="lost")


def test_a_report_aggregates_results():
    found = report([good(0.0), good(1.6)])
    assert found["duration"] == pytest.approx(2.0)
    assert found["tokens_per_second"] == pytest.approx(3.0)
    assert found["requests_per_second"] == pytest.approx(1.0)
    assert found["exits"] == {1: 4, 3: 2}
    assert found["num_prompt_tokens"] == 8
    assert found["time_to_first_token"]["mean"] == pytest.approx(0.1)
    assert found["inter_token_latency"]["max"] == pytest.approx(0.1)


def test_failed_requests_count_as_errors_only_also_in_json():
    read = json.loads(json.dumps(report([good(0.0), FAILED])))
    assert read["exits"] == {"1": 2, "3": 1}
    assert read["tokens_per_second"] == pytest.approx(4 / 9)
    assert read["num_failed"] == 1
    found = report([good(0.0), FAILED, FAILED])
    assert (found["num_succeeded"], found["num_failed"]) == (1, 2)
    assert found["errors"] == {"error in stream": 2}
    assert found["messages"] == {"error in stream": "lost"}
    assert found["latency"]["max"] == pytest.approx(0.4)
    assert found["time_to_first_token"]["mean"] == pytest.approx(0.1)


def point(*results: RequestResult, **workload: float) -> Point:
    return Workload(**workload), report(results)


def test_the_table_shows_a_column_per_load_and_the_errors():
    screen = io.StringIO()
    points = [point(good(0.0), FAILED, rate=5.0), point(good(0.0), rate=2.5)]
    Console(file=screen, width=80).print(table(points))
    for part in ("rate 2.5/s", "first token, ms: p50", "100.0", "66.7%", "error in stream", "1: lost"):
        assert part in screen.getvalue()
