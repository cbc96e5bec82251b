from pathlib import Path

import pytest

from loadtest.workload import Workload, WorkloadError, read_prompts


def test_prompts_repeat_and_every_request_has_its_own_seed():
    requests = list(Workload(prompts=("a", "b"), num_requests=3, seed=10).requests())
    assert [(request.prompt, request.seed) for request in requests] == [("a", 10), ("b", 11), ("a", 12)]


def test_the_open_loop_arrives_at_the_asked_rate_in_order():
    arrivals = [request.arrival for request in Workload(num_requests=4000, rate=20.0).requests()]
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] == pytest.approx(4000 / 20, rel=0.1)


def test_the_same_seed_arrives_at_the_same_times():
    workload = Workload(num_requests=5, rate=1.0, seed=3)
    assert list(workload.requests()) == list(workload.requests())


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_requests": 0},
        {"max_tokens": 0},
        {"concurrency": 0},
        {"rate": 0.0},
        {"rate": float("inf")},
        {"prompts": ()},
    ],
)
def test_a_workload_that_cannot_be_run_is_refused(wrong):
    with pytest.raises(WorkloadError):
        Workload(**wrong)


def test_text_holds_a_prompt_per_line(tmp_path: Path):
    path = tmp_path / "prompts.txt"
    path.write_text("one\n\ntwo ü\n", encoding="utf-8")
    assert read_prompts(path) == ("one", "two ü")


def test_spec_bench_gives_its_first_turns(tmp_path: Path):
    path = tmp_path / "question.jsonl"
    path.write_text('{"question_id": 81, "turns": ["first", "second"]}\n{"prompt": "plain"}\n')
    assert read_prompts(path) == ("first", "plain")


@pytest.mark.parametrize("line", ["not json", "[]", "{}", '{"turns": []}', '{"prompt": 3}'])
def test_an_entry_without_a_prompt_is_named(tmp_path: Path, line: str):
    path = tmp_path / "broken.jsonl"
    path.write_text(f'{{"prompt": "fine"}}\n{line}\n')
    with pytest.raises(WorkloadError, match="entry 2"):
        read_prompts(path)
