"""Each experiment once, on a tiny model: what it finds that does not depend on time."""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from rich.console import Console
from torch.autograd import DeviceType

from nvium_core import InvalidRequest, SamplingParams
from nvium_core.bench import (
    chunking,
    determinism,
    drafts,
    experiments,
    heads,
    logprobs,
    peers,
    prefix,
    profile,
    prompts,
)
from nvium_core.bench.chunking import Scene
from nvium_core.bench.contenders.contender import Generation
from nvium_core.bench.experiments import Experiment
from nvium_core.bench.harness import Figures, timed
from nvium_core.bench.prompts import first_token, weighed
from nvium_core.engine.device import native
from nvium_core.engine.schedule.costs import StepCosts
from tests.bench.tiny import tiny_subject

SMALL: dict[str, Mapping[str, Any]] = {
    "schedules": {"sequences": (1, 2), "tokens": 4, "repeats": 1, "simulated_tokens": 200},
    "throughput": {"sequences": (1, 2), "tokens": 4, "repeats": 1},
    "memory": {"sequences": (3,), "tokens": 20, "every": 5},
    "prefix": {"prefix_tokens": 48, "tokens": 5, "repeats": 1},
    "chunking": {"sequences": (2,), "tokens": 4, "repeats": 1},
    "logprobs": {"sequences": (2,), "tokens": 6, "repeats": 1},
    "determinism": {"requests": 8, "sequences": (1,), "tokens": 30, "repeats": 1},
    "costs": {"requests": 9},
    "heads": {"tokens": 20_000, "repeats": 1},
    "peers": {
        "sequences": (1, 2),
        "tokens": 4,
        "repeats": 1,
        "simulated_tokens": 200,
        "buffer_bytes": 2**20,
        "enough_seconds": 1e-9,
    },
    "prompts": {"prompt_tokens": (3, 40), "repeats": 2},
    "profile": {"sequences": (1, 2), "tokens": 4, "repeats": 1},
    "host": {"sequences": (1, 3), "tokens": 4, "repeats": 1},
    "threads": {"sequences": (1, 3), "tokens": 4, "repeats": 1},
    "drafts": {"sequences": (1, 2), "tokens": 12, "repeats": 1},
    "lookup": {"tokens": 40, "repeats": 2},
    "exits": {"sequences": (1, 2), "tokens": 24, "repeats": 1},
    "sampling": {"sequences": (1, 2), "tokens": 6, "repeats": 2},
}


@cache
def found(name: Experiment) -> Figures:
    """An experiment's figures, measured once."""
    if name == "lookup":
        pytest.importorskip("llama_cpp")
    return experiments.measure(name, tiny_subject(), SMALL[name])


@pytest.mark.parametrize("name", get_args(Experiment))
def test_figures_are_shown_saved_and_drawn(name: Experiment, tmp_path: Path) -> None:
    saved, drawn = tmp_path / "figures.json", tmp_path / "figures.png"
    has_plot = name in {"peers", "prompts"}
    experiments.check(name, SMALL[name], saved, drawn if has_plot else None)
    experiments.save([found(name)], saved, drawn if has_plot else None)
    read = json.loads(saved.read_text())
    assert read.keys() == found(name).keys()
    assert {name: read[name] for name in ("experiment", "model", "device", "dtype")} == {
        "experiment": name,
        "model": "tiny",
        "device": "cpu",
        "dtype": "float64",
    }
    assert not has_plot or drawn.read_bytes().startswith(b"\x89PNG")
    console = Console(width=120, record=True)
    console.print(experiments.table(read))
    assert len(console.export_text().splitlines()) > 4


def test_a_known_prefix_changes_no_token() -> None:
    figures = found("prefix")
    assert figures["warm_outputs_are_identical"]
    assert figures["forked_outputs_are_identical"]
    assert figures["rows_found"] == 2 * 48


def test_outputs_that_differ_are_noticed() -> None:
    subject = tiny_subject()
    one, other = (timed(subject.engine(), [([1], SamplingParams(max_tokens=30, seed=seed))]) for seed in (1, 2))
    assert not prefix.agreement("these", [(one, other)])["these_outputs_are_identical"]


def test_streams_are_heard_before_while_and_after_the_newcomer_waits() -> None:
    [row] = found("chunking")["rows"]
    assert row["ways"].keys() == {"chunked", "whole"}
    for way in row["ways"].values():
        ends = [end for end, _ in way["gaps"]]
        assert min(ends) < 0 < way["first_token_ms"] < max(ends)
        assert way["median_gap_ms"] <= way["p99_gap_ms"] <= way["worst_gap_ms"]


def test_a_gap_counts_as_disturbed_if_any_part_of_it_lies_in_the_newcomers_wait() -> None:
    scene = Scene({"0": [-3.0, -2.0, 1.0, 6.0, 8.0], chunking.NEWCOMER: [5.0, 9.0]})
    assert scene.quiet_gaps == [1.0]
    assert scene.disturbed_gaps == [3.0, 5.0]
    assert scene.first_token_seconds == 5.0


def test_tokens_leave_sooner_where_routers_are_shifted_to_less_depth_and_the_limit_rises() -> None:
    rows = found("exits")["rows"]
    assert [(row["sequences"], row["asked_depth"]) for row in rows] == [
        (n, d) for n in (1, 2) for d in (0.9, 0.85, 0.8)
    ]
    shifts = [row["shift"] for row in rows[:3]]
    assert shifts == sorted(shifts) == [row["shift"] for row in rows[3:]] and shifts[0] < shifts[-1]
    for row in rows:
        assert sum(row["routing"]) == pytest.approx(1)
        assert ("limit" in row) == (row["sequences"] == 1)
    for row in rows[:3]:
        assert row["share_of_limit"] == pytest.approx(row["ratio"] / row["limit"])


def test_drafts_change_no_token_and_all_turns_beside_both_engines_are_kept() -> None:
    rows = found("drafts")["rows"]
    assert [(row["sequences"], row["temperature"]) for row in rows] == [(1, 1.0), (1, 0.0), (2, 1.0), (2, 0.0)]
    for row in rows:
        assert row["tokens_are_identical"]
        assert row["turns"].keys() == {"lossless", "dense", "undrafted"}
        for turns in row["turns"].values():
            num_answers = row["sequences"] * len(drafts.LENGTHS) if row["sequences"] > 1 else 1
            assert [turn["tokens"] for turn in turns] == [12 * num_answers]


def test_an_engine_without_drafts_for_a_while_drafts_none_and_goes_on_with_what_it_knew() -> None:
    engine = tiny_subject().engine(max_drafts=2)
    drafting, asked = engine.scheduler.drafting, SamplingParams(sampling="original", seed=1, max_tokens=20)
    with drafts.undrafted(engine):
        (without,) = engine.generate([[1, 2, 3]], asked)
    assert drafting.num_drafted == 0
    (with_drafts,) = engine.generate([[1, 2, 3]], asked)
    assert engine.scheduler.drafting is drafting and drafting.num_drafted > 0
    assert with_drafts.token_ids == without.token_ids


def test_llama_cpp_says_the_same_with_its_prompt_lookup() -> None:
    rows = found("lookup")["rows"]
    assert [(row["drafts"], row["equal_answers"]) for row in rows] == [(2, 2), (10, 2)]


def test_ways_to_sample_are_timed_beside_plain_and_under_both_schedules() -> None:
    figures = found("sampling")
    assert figures["ways"]["suggested"] == {"temperature": 0.7, "top_p": 0.95}
    assert [row["sequences"] for row in figures["rows"]] == [1, 2]
    for row in figures["rows"]:
        ways = row["ways"]
        assert ways.keys() == figures["ways"].keys()
        assert ways["plain"]["over_plain"] == 1
        for way in ways.values():
            assert len(way["turns"]) == len(way["synchronous"]["turns"]) == 2
            assert min(way["over_plain"], way["over_synchronous"], way["processor_ms_per_token"]) > 0


def test_log_probabilities_change_no_token_and_come_at_most_a_few_tokens_late() -> None:
    [row] = found("logprobs")["rows"]
    assert row["tokens_are_identical"]
    assert 0 <= row["mean_delay_tokens"] <= row["most_delay_tokens"] < 6  # 0 where all Steps are whole passes


def test_what_is_told_as_it_is_spoken_is_not_late() -> None:
    subject, seen = tiny_subject(), list[int]()
    engine = subject.engine(max_sequences=2)
    requests = logprobs.requests(subject, 2, 6, None, turn=0)
    timed(engine, requests, logprobs.delay_counter(engine, seen))
    assert seen == [0] * 12


def test_nothing_differs_in_company_though_company_is_unsettling() -> None:
    modes = found("determinism")["modes"]
    for mode in modes.values():
        assert mode["preemptions"] > 0
        assert mode["rows_found"] > 0
        assert mode["chunks"] > 0
        assert [group["at_a_time"] for group in mode["groups"]] == [1, 4, 8]
    assert modes["deterministic"]["differing_tokens"] == modes["deterministic"]["differing_exits"] == 0


def test_what_differs_in_company_is_counted() -> None:
    subject = tiny_subject()
    requests = determinism.mixed_requests(subject, 3, 10)
    expected = [determinism.alone(subject, request, is_deterministic=False) for request in reversed(requests)]
    seen = determinism.in_company(subject, requests, 2, is_deterministic=False, expected=expected)
    assert seen["differing_tokens"] > 0


def test_saved_costs_are_what_planning_reads() -> None:
    costs = StepCosts.from_dict(json.loads(json.dumps(found("costs"))))
    assert costs.num_blocks == 3
    assert [1000 * seconds for seconds in costs.fixed] == pytest.approx(found("costs")["fixed_ms"])


@pytest.mark.parametrize(
    ("name", "given", "field"),
    [
        ("costs", {"sequences": (1,)}, "sequences"),
        ("schedules", {"requests": 3}, "requests"),
        ("costs", {"repeats": 3}, "repeats"),
        ("schedules", {"tokens": 0}, "tokens"),
        ("chunking", {"repeats": 0}, "repeats"),
    ],
)
def test_options_that_mean_nothing_are_refused_by_name(name: Experiment, given: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{field}: "):
        experiments.check(name, given)


@pytest.mark.parametrize(
    ("name", "json_file", "plot", "field"),
    [
        ("prefix", None, "a.png", "plot"),
        ("peers", None, "a.txt", "plot"),
        ("peers", None, "nowhere/a.png", "plot"),
        ("schedules", "nowhere/a.json", None, "json"),
    ],
)
def test_places_that_cannot_be_written_are_refused_before_anything_is_measured(
    tmp_path: Path, name: Experiment, json_file: str | None, plot: str | None, field: str
) -> None:
    with pytest.raises(InvalidRequest, match=f"^{field}: "):
        experiments.check(name, {}, *(tmp_path / file if file else None for file in (json_file, plot)))


def test_sizes_whose_logits_training_would_hold_are_marked() -> None:
    figures = found("heads")
    assert figures["chunked_from_tokens"] == 2**26 // figures["vocabulary"] + 1
    few, many = (heads.table(figures | {"chunked_from_tokens": limit}) for limit in (20_001, 20_000))
    assert "--tokens 20001" in str(few.caption) and many.caption is None


def test_logits_in_chunks_take_a_fraction_of_the_memory() -> None:
    figures = found("heads")
    held_bytes = figures["tokens"] * figures["vocabulary"] * 4 * figures["exits"]
    assert figures["ways"]["held"]["peak_bytes"] > held_bytes
    assert figures["peak_ratio"] < 0.8


def test_every_contender_is_beside_ours_and_who_is_missing_is_named() -> None:
    figures = found("peers")
    for row in figures["rows"]:
        present = {name.partition("/")[0] for name in row["contenders"]} - {"optimal"}
        assert present == row["ours_over"].keys()
        assert present | figures["left_out"].keys() == {
            "sweep",
            "synchronous",
            "dense twin",
            "generate",
            "continuous",
            "llama.cpp",
        }
        assert sum(row["routing"]) == pytest.approx(1)
        assert all(seen["ours_over"] > 0 < seen["first_token_ms"] for seen in row["contenders"].values())
    one, two = figures["rows"]
    assert one["gain"]["limit"] > 1
    assert "limit" not in two["gain"]
    assert one["work"]["optimal"]["bytes"] < one["work"]["synchronous"]["bytes"]
    assert two["work"].keys() == {"synchronous", "dense twin"}
    assert two["work"]["dense twin"]["bytes"] < one["work"]["dense twin"]["bytes"]
    machine = figures["machine"]
    assert min(machine["threads"], machine["bytes_per_second"], *machine["flops_per_second"].values()) > 0
    assert machine["instructions"] == figures["instructions"]


def test_who_is_not_invited_does_not_race() -> None:
    figures = peers.measure(
        tiny_subject(), **{**SMALL["peers"], "sequences": (1,), "against": ("synchronous", "generate")}
    )
    [row] = figures["rows"]
    assert row["ours_over"].keys() == {"synchronous", "generate"}
    assert row["work"].keys() == {"optimal", "synchronous"}
    assert figures["left_out"] == {}
    with pytest.raises(InvalidRequest, match=r"^against: .* got 'vllm'"):
        peers.measure(tiny_subject(), against=("sweep", "vllm"))


def test_runs_of_several_shapes_are_saved_and_drawn_beside_one_another(tmp_path: Path) -> None:
    saved, drawn = tmp_path / "figures.json", tmp_path / "figures.png"
    runs = [{**found("peers"), "model": f"random-{shape}"} for shape in ("2x128", "24x768")]
    experiments.check("peers", {}, saved, drawn, several=True)
    experiments.save(runs, saved, drawn)
    assert [run["model"] for run in json.loads(saved.read_text())] == ["random-2x128", "random-24x768"]
    assert drawn.read_bytes().startswith(b"\x89PNG")


def test_first_tokens_are_timed_at_every_exit_and_weighed_by_its_probability() -> None:
    first = weighed(first_token(lambda seed: spoken_after(10.0 * seed)), {1: (3, 0.2), 4: (5, 0.6)})(0)
    assert first.seconds == pytest.approx(45)
    assert 0 <= first.processor_seconds < 1
    for row in found("prompts")["rows"]:
        assert sum(row["routing"].values()) >= prompts.MIN_SEEN_PROBABILITY
        assert {"optimal", "sweep", "synchronous", "dense twin", "generate/static"} < row["contenders"].keys()
        assert all(len(seen["turns_ms"]) == 2 and seen["over_ours"] > 0 for seen in row["contenders"].values())
        assert all(seen["processor_ms"] > 0 for seen in row["contenders"].values())


def test_a_prompt_that_leaves_no_room_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"^prompt_tokens: must be below 256, got 256"):
        prompts.measure(tiny_subject(), prompt_tokens=(16, 256))


def spoken_after(seconds: float) -> Generation:
    return Generation(seconds=seconds, first_token_seconds=[seconds], token_ids=[[0]])


def test_seeds_are_found_whose_first_tokens_leave_at_their_exits() -> None:
    subject = tiny_subject()
    engine = subject.engine(prefix_caching=False)
    draws = prompts.first_draws(engine, subject.prompt)
    [probabilities] = subject.model(torch.tensor([subject.prompt])).exit_probs[:, -1].tolist()
    for exit_, (seed, probability) in draws.items():
        [generated] = engine.generate([subject.prompt], SamplingParams(max_tokens=1, seed=seed))
        assert generated.exits == [exit_]
        assert probability == pytest.approx(probabilities[exit_ - 1])


def test_a_profile_s_parts_make_up_the_step() -> None:
    for row in found("profile")["rows"]:
        assert sum(row["parts_ms"].values()) == pytest.approx(row["step_ms"])
        assert min(row["parts_ms"].values()) > 0
        assert 0 < row["share_outside_kernels"] < 1


def test_a_kernel_s_time_counts_once_in_a_profile() -> None:
    def event(device: DeviceType, *, is_user_annotation: bool = False) -> SimpleNamespace:
        return SimpleNamespace(device_type=device, self_device_time_total=7.0, is_user_annotation=is_user_annotation)

    launch, kernel, stretch = DeviceType.CPU, DeviceType.CUDA, DeviceType.CUDA
    events = [event(launch), event(kernel), event(stretch, is_user_annotation=True)]
    assert profile.device_microseconds(events) == 7.0


def test_a_profile_of_pytorch_s_layers_has_the_same_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "knows", lambda *_: False)
    (row,) = profile.measure(tiny_subject(), sequences=(1,), tokens=8)["rows"]
    assert min(row["parts_ms"].values()) > 0
