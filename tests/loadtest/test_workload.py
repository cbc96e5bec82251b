from itertools import pairwise

import pytest

from loadtest.prompts import Lengths, Prompt, WorkloadError
from loadtest.workload import Workload

PROMPTS = (Prompt("a"), Prompt("b"))


def test_prompts_repeat_and_every_request_has_its_own_seed():
    requests = list(Workload(prompts=PROMPTS, num_requests=3, seed=10).requests())
    assert [(request.prompt.content, request.seed) for request in requests] == [("a", 10), ("b", 11), ("a", 12)]


def test_requests_go_on_where_others_have_stopped():
    lengths = Lengths(1, 1000)
    whole = Workload(prompts=PROMPTS, num_requests=5, max_tokens=lengths)
    rest = Workload(prompts=PROMPTS, num_requests=2, max_tokens=lengths, first=3)
    assert list(rest.requests()) == list(whole.requests())[3:]


def test_the_open_loop_arrives_at_the_asked_rate_in_order():
    arrivals = [request.arrival for request in Workload(num_requests=4000, rate=20.0).requests()]
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] == pytest.approx(4000 / 20, rel=0.1)


def test_the_gaps_between_arrivals_are_as_irregular_as_a_poisson_process():
    arrivals = [0.0, *(request.arrival for request in Workload(num_requests=4000, rate=20.0).requests())]
    gaps = [later - earlier for earlier, later in pairwise(arrivals)]
    assert sum(gap > 1 / 20 for gap in gaps) / 4000 == pytest.approx(0.368, abs=0.03)


def test_the_same_seed_arrives_at_the_same_times():
    workload = Workload(num_requests=5, rate=1.0, seed=3)
    assert list(workload.requests()) == list(workload.requests())


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        ({"num_requests": 0}, "requests"),
        ({"concurrency": 0}, "concurrency"),
        ({"rate": 0.0}, "rate"),
        ({"rate": float("inf")}, "rate"),
        ({"rate": float("nan")}, "rate"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"prompts": ()}, "prompts"),
    ],
)
def test_a_workload_that_cannot_be_run_is_refused_by_name(wrong, name):
    with pytest.raises(WorkloadError, match=name):
        Workload(**wrong)
