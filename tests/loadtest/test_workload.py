import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.workload import Workload, WorkloadError, read_prompts, workloads

PROMPTS = ("a", "b")


def test_prompts_repeat_and_every_request_has_its_own_seed():
    requests = list(Workload(prompts=PROMPTS, num_requests=3, seed=10).requests())
    found = [(fields["prompt"], fields["seed"]) for _, fields in requests]
    assert found == [("a", 10), ("b", 11), ("a", 12)]


def test_the_open_loop_arrives_in_order_at_its_rate():
    arrivals = [arrival for arrival, _ in Workload(num_requests=4000, rate=20.0).requests()]
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] == pytest.approx(4000 / 20, rel=0.1)


def test_prompts_are_the_lines_of_a_file(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("first\n\nsecond\n")
    assert read_prompts(path) == ("first", "second")
    path.write_text("\n")
    with pytest.raises(WorkloadError, match="contains no prompts"):
        read_prompts(path)


@given(num_levels=st.integers(1, 5), num_requests=st.integers(1, 9), warm_up=st.integers(0, 4))
def test_all_requests_of_a_sweep_have_different_seeds(num_levels, num_requests, warm_up):
    levels = [{"concurrency": number + 1} for number in range(num_levels)]
    sweep = workloads(Workload(num_requests=num_requests), levels, warm_up)
    starts = [load.first - warm_up for load in sweep]
    assert starts == [number * (num_requests + warm_up) for number in range(num_levels)]
