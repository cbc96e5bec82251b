"""GuideLLM, another load test, measures streams of this server; its means are recorded with the server's own."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.programs import CLIENTS, installed, pinned, run
from tests.conformance.serving import Served

NUM_REQUESTS = 48
NUM_STREAMS = 4
PROMPT_TOKENS = 32
OUTPUT_TOKENS = 32
FIRST_TOKEN = "nvium_time_to_first_token_seconds"
NEXT_TOKEN = "nvium_inter_token_latency_seconds"


@pytest.mark.conformance
@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/chat/completions"])
def test_guidellm_measures_streams_to_their_ends(server, tmp_path, record, endpoint):
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
    totals = {"successful": NUM_REQUESTS, "errored": 0, "incomplete": 0, "total": NUM_REQUESTS}
    assert measured["request_totals"] == totals
    assert mean(measured, "output_token_count") == OUTPUT_TOKENS


def measure(server: Served, endpoint: str, folder: Path) -> Any:
    figures = folder / "guidellm.json"
    command: list[str | Path] = [
        installed(CLIENTS / "bin" / "guidellm"), "run", "--disable-console-interactive",
        "--backend", f"kind=openai_http,target={server.url},model={server.model},request_format={endpoint}",
        "--profile", f"kind=concurrent,streams={NUM_STREAMS}",
        "--constraint", f"kind=max_requests,count={NUM_REQUESTS}",
        "--tokenizer", f"kind=huggingface_auto,model={server.folder}",
        "--data", f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={OUTPUT_TOKENS}",
        "--output", f"kind=json,path={figures}",
    ]  # fmt: skip
    run(command, seconds=240, cwd=folder, environment={"HF_HOME": str(folder)})
    [benchmark] = json.loads(figures.read_text(encoding="utf-8"))["benchmarks"]
    return benchmark["metrics"]


def mean(measured: Any, name: str) -> float:
    return measured[name]["successful"]["mean"]


def unlabelled(server: Served) -> dict[str, float]:
    return {sample.name: sample.value for sample in server.samples() if not sample.labels}


def mean_between(before: dict[str, float], after: dict[str, float], histogram: str) -> float:
    total, count = (after[f"{histogram}_{part}"] - before[f"{histogram}_{part}"] for part in ("sum", "count"))
    return total / count
