"""A load test that others wrote measures this server; its means stand beside those of the server and of our load test.

Nothing is asserted of the times alone: what they come to depends on what else the machine does. The two load tests take
turns, each beside the server's own histograms, and must agree as far as the turns agree among themselves.
"""

import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import pytest

from tests.conformance.conftest import Record
from tests.conformance.programs import CLIENTS, installed, pinned, run
from tests.conformance.serving import Served

NUM_REQUESTS = 48
NUM_STREAMS = 4
PROMPT_TOKENS = 32
OUTPUT_TOKENS = 32
FIRST_TOKEN = "nvium_time_to_first_token_seconds"
NEXT_TOKEN = "nvium_inter_token_latency_seconds"
WHOLE_REQUEST = "nvium_request_latency_seconds"

NUM_TURNS = 6
DIFFERENCE = 0.05
"""By how much two load tests may differ beyond their noise: where each starts and stops its clocks."""
STANDARD_ERRORS = 3


@pytest.mark.conformance
@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/chat/completions"])
def test_guidellm_measures_streams_to_their_ends(server: Served, tmp_path: Path, record: Record, endpoint: str) -> None:
    before = unlabelled(server)
    measured = measure(server, endpoint, tmp_path)
    after = unlabelled(server)
    record(
        "guidellm",
        pinned("guidellm"),
        endpoint=endpoint,
        requests=measured["request_totals"]["successful"],
        tokens_per_second=round(mean(measured, "output_tokens_per_second")),
        first_token_ms=round(mean(measured, "time_to_first_token_ms"), 1),
        first_token_ms_by_the_server=round(1000 * mean_between(before, after, FIRST_TOKEN), 1),
        next_token_ms=round(mean(measured, "inter_token_latency_ms"), 2),
        next_token_ms_by_the_server=round(1000 * mean_between(before, after, NEXT_TOKEN), 2),
    )
    assert measured["request_totals"] == {
        "successful": NUM_REQUESTS,
        "errored": 0,
        "incomplete": 0,
        "total": NUM_REQUESTS,
    }
    assert mean(measured, "output_token_count") == OUTPUT_TOKENS


@pytest.mark.conformance
@pytest.mark.timeout(1200)
def test_guidellm_and_our_load_test_agree_within_their_noise(server: Served, tmp_path: Path, record: Record) -> None:
    turns = [both(server, tmp_path, number) for number in range(NUM_TURNS)]
    ratios = {
        name: [ours.beside_the_server[name] / theirs.beside_the_server[name] for ours, theirs in turns]
        for name in turns[0][0].found
    }
    programs = {"loadtest": [ours for ours, _ in turns], "guidellm": [theirs for _, theirs in turns]}
    record(
        "guidellm beside loadtest",
        pinned("guidellm"),
        turns=NUM_TURNS,
        **{
            f"{name}_by_{program}": float(f"{median(each.found[name] for each in measured):.4g}")
            for name in ratios
            for program, measured in programs.items()
        },
        **{f"{name}_ratio": round(median(values), 3) for name, values in ratios.items()},
        **{f"{name}_ratios": f"{min(values):.3f} to {max(values):.3f}" for name, values in ratios.items()},
    )
    for name, values in ratios.items():
        logarithms = [math.log(value) for value in values]
        noise = STANDARD_ERRORS * stdev(logarithms) / math.sqrt(NUM_TURNS)
        assert abs(fmean(logarithms)) <= DIFFERENCE + noise, name


@dataclass(frozen=True)
class Turn:
    """What a load test found, and what the server's own histograms say of the same requests."""

    found: dict[str, float]
    by_the_server: dict[str, float]

    @property
    def beside_the_server(self) -> dict[str, float]:
        """Of these ratios, what else the machine does is no part, nor how much each load test takes from the server."""
        return {name: value / self.by_the_server[name] for name, value in self.found.items()}


def both(server: Served, folder: Path, number: int) -> tuple[Turn, Turn]:
    """Ours and theirs, who goes first by turns; no two turns have the same prompts."""
    ours = turn(server, lambda: by_us(server, folder, number)) if number % 2 else None
    theirs = turn(server, lambda: by_guidellm(server, folder, number))
    return ours or turn(server, lambda: by_us(server, folder, number)), theirs


def turn(server: Served, measured: Callable[[], dict[str, float]]) -> Turn:
    before = unlabelled(server)
    found = measured()
    after = unlabelled(server)
    by_the_server = {
        "first_token_ms": 1000 * mean_between(before, after, FIRST_TOKEN),
        "next_token_ms": 1000 * mean_between(before, after, NEXT_TOKEN),
        "tokens_per_second": NUM_STREAMS * OUTPUT_TOKENS / mean_between(before, after, WHOLE_REQUEST),
    }
    return Turn(found, by_the_server)


def by_guidellm(server: Served, folder: Path, number: int) -> dict[str, float]:
    measured = measure(server, "/v1/completions", folder, seed=number)
    return {
        "first_token_ms": mean(measured, "time_to_first_token_ms"),
        "next_token_ms": mean(measured, "inter_token_latency_ms"),
        "tokens_per_second": mean(measured, "output_tokens_per_second"),
    }


def by_us(server: Served, folder: Path, number: int) -> dict[str, float]:
    """The same, of a load like theirs."""
    figures = folder / "loadtest.json"
    command: list[str | Path] = [
        sys.executable, "-m", "loadtest", "--base-url", server.url,
        "--concurrency", str(NUM_STREAMS), "--requests", str(NUM_REQUESTS), "--warm-up", "0",
        "--seed", str(number * NUM_REQUESTS),
        "--prompt-tokens", str(PROMPT_TOKENS), "--max-tokens", str(OUTPUT_TOKENS), "--ignore-eos", "--json", figures,
    ]  # fmt: skip
    assert run(command, seconds=240).exit_code == 0
    [point] = json.loads(figures.read_text(encoding="utf-8"))["points"]
    latencies = point["report"]["latencies"]
    return {
        "first_token_ms": 1000 * latencies["time_to_first_token"]["mean"],
        "next_token_ms": 1000 * latencies["inter_token_latency"]["mean"],
        "tokens_per_second": point["report"]["tokens_per_second"],
    }


def measure(server: Served, endpoint: str, folder: Path, seed: int = 0) -> Any:
    """The metrics of one run of the program."""
    figures = folder / "guidellm.json"
    command: list[str | Path] = [
        installed(CLIENTS / "bin" / "guidellm"), "run", "--disable-console-interactive",
        "--backend", f"kind=openai_http,target={server.url},model={server.model},request_format={endpoint}",
        "--profile", f"kind=concurrent,streams={NUM_STREAMS}",
        "--constraint", f"kind=max_requests,count={NUM_REQUESTS}",
        "--tokenizer", f"kind=huggingface_auto,model={server.folder}",
        "--data", f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={OUTPUT_TOKENS}",
        "--seed", f"kind=static,value={seed}",
        "--output", f"kind=json,path={figures}",
    ]  # fmt: skip
    assert run(command, seconds=240, cwd=folder, environment={"HF_HOME": str(folder)}).exit_code == 0
    [benchmark] = json.loads(figures.read_text(encoding="utf-8"))["benchmarks"]
    return benchmark["metrics"]


def mean(measured: Any, name: str) -> float:
    of_successful: float = measured[name]["successful"]["mean"]
    return of_successful


def unlabelled(server: Served) -> dict[str, float]:
    return {sample.name: sample.value for sample in server.samples() if not sample.labels}


def mean_between(before: dict[str, float], after: dict[str, float], histogram: str) -> float:
    total, count = (after[f"{histogram}_{part}"] - before[f"{histogram}_{part}"] for part in ("sum", "count"))
    return total / count
