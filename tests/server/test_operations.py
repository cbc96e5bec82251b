import re
import socket
from math import inf, isnan
from typing import get_args

from nvium_core.engine.worker import IDLE_WAIT_SECONDS
from server.errors import REJECTIONS
from server.http.server import listen
from server.telemetry.metrics import Metrics, Outcome
from tests.byte_model import EXIT_LAYERS, NAME, load_byte_model
from tests.server.live_server import live_server, wait_until


def test_a_cache_smaller_than_the_context_is_the_context():
    with live_server(load_byte_model(), cache_tokens=64) as server:
        assert server.http.get("/v1/models").json()["data"][0]["max_model_len"] == 64
        assert server.chat().json()["usage"]["total_tokens"] <= 64
        assert server.complete(prompt="a" * 64).json()["error"]["code"] == "context_length_exceeded"


def test_a_strict_client_lists_and_finds_the_model(server):
    client = server.client()
    assert [model.id for model in client.models.list()] == [NAME]
    for asked in (NAME, "default"):
        card = client.models.retrieve(asked).model_dump()
        assert card["id"] == NAME
        assert card["max_model_len"] == 4096
        assert re.fullmatch(r"(baseline|avx2|avx512|neon)x\d+", card["nvium"].pop("processor"))
        expected = {"exit_layers": EXIT_LAYERS, "num_layers": 4, "num_loops": 1, "eager_passes": {}, "cache": "float64"}
        expected |= {"weights": "F64", "bits_per_weight": 64, "arithmetic": "float64"}
        assert card["nvium"] == expected | {"suggested": {"temperature": 1.0, "top_p": 1.0}}
        assert card["limits"]["max_n"] == 128


def test_card_and_fingerprint_tell_the_precision_of_the_cache():
    loaded = load_byte_model()
    loaded.model.float()
    with live_server(loaded, cache_dtype="bfloat16") as server:
        card = server.client().models.retrieve("default").model_dump()["nvium"]
        assert (card["arithmetic"], card["cache"]) == ("float32", "bfloat16")
        assert "-float32-bfloat16-" in server.complete(max_tokens=1).json()["system_fingerprint"]


def test_probes_succeed_and_reveal_nothing(server):
    for path in ("/livez", "/readyz", "/health"):
        assert server.http.get(path).json() == {"status": "ok"}
    assert list(server.http.get("/version").json()) == ["version"]


def test_metrics_count_tokens_and_requests(server):
    def totals() -> list[float]:
        exits = [server.gauge(f'nvium_generated_tokens_total{{exit="{number}"}}') for number in (1, 2, 3)]
        names = ["nvium_prompt_tokens_total", "nvium_time_to_first_token_seconds_count", "nvium_queue_seconds_count"]
        return exits + [server.gauge(name) for name in [*names, "nvium_exit_depth_ratio_count"]]

    before = totals()
    body = server.complete(max_tokens=10, ignore_eos=True, n=2).json()
    gained = [now - then for now, then in zip(totals(), before, strict=True)]
    assert gained == [*body["nvium"]["exit_counts"], 4, 1, 2, 20]


def test_metrics_cover_the_steps_of_every_block(server):
    for _ in range(20):
        server.complete(max_tokens=900, ignore_eos=True)
        if not isnan(server.gauge("nvium_piggyback_speedup_ratio")):
            break  # the schedules have been measured
    page = server.http.get("/metrics").text
    for name in ('steps_total{block="3"}', 'step_seconds_bucket{block="3",', 'step_rows_bucket{block="3",'):
        assert f"\nnvium_{name}" in page
    assert server.gauge("nvium_piggyback_speedup_ratio") > 0


def test_responses_are_counted_by_status_finish_reason_and_length(server):
    names = [
        'nvium_responses_total{endpoint="completions",status="200"}',
        'nvium_responses_total{endpoint="completions",status="404"}',
        'nvium_requests_total{endpoint="completions",outcome="completed"}',
        'nvium_requests_total{endpoint="completions",outcome="invalid"}',
        'nvium_finished_choices_total{finish_reason="length"}',
        'nvium_finished_choices_total{finish_reason="tool_calls"}',
        "nvium_request_prompt_tokens_count",
        "nvium_request_prompt_tokens_sum",
        'nvium_request_generated_tokens_bucket{le="10.0"}',
        'nvium_request_generated_tokens_bucket{le="20.0"}',
    ]
    before = [server.gauge(name) for name in names]
    server.complete(max_tokens=6, ignore_eos=True, n=2)
    server.complete(model="other")
    gained = [server.gauge(name) - then for name, then in zip(names, before, strict=True)]
    assert gained == [1, 1, 1, 1, 2, 0, 1, 4, 0, 1]
    tool = {"type": "function", "function": {"name": "f"}}
    asked = {"tools": [tool], "tool_choice": {"type": "function", "function": {"name": "f"}}}
    server.chat(**asked)
    server.chat(**asked, stream=True)
    assert server.gauge(names[5]) == before[5] + 2


def test_metrics_describe_the_model_the_seats_and_the_process(server):
    page = server.http.get("/metrics").text
    assert '\nnvium_model_info{context="4096",device="cpu",dtype="float64",fingerprint="' in page
    assert f'model_name="{NAME}"' in page
    assert server.gauge("nvium_seats") == 32
    version = server.http.get("/version").json()["version"]
    assert server.gauge(f'nvium_build_info{{version="{version}"}}') == 1
    for name in ("cpu_seconds_total", "resident_memory_bytes", "open_fds", "start_time_seconds"):
        assert server.gauge(f"process_{name}") > 0


def test_latency_buckets_can_be_replaced():
    def bounds(page: str, name: str) -> list[float]:
        return [float(bound) for bound in re.findall(rf'^nvium_{name}_bucket{{le="(.*?)"}}', page, re.MULTILINE)]

    page = Metrics().page().decode()
    assert bounds(page, "inter_token_latency_seconds")[0] == 0.0001
    assert bounds(page, "request_latency_seconds")[-2] == 1800
    page = Metrics([0.5, 1]).page().decode()
    for name in ("inter_token_latency_seconds", "request_latency_seconds", "queue_seconds"):
        assert bounds(page, name) == [0.5, 1, inf]


def test_all_series_exist_at_zero(byte_model):
    with live_server(byte_model) as server:
        for outcome in get_args(Outcome):
            assert server.gauge(f'nvium_requests_total{{endpoint="chat_completions",outcome="{outcome}"}}') == 0
        assert all(server.gauge(f'nvium_rejected_total{{reason="{reason}"}}') == 0 for reason in REJECTIONS)


def test_the_heartbeats_age_grows_when_the_device_thread_has_ended(byte_model):
    name = "nvium_device_heartbeat_age_seconds"
    with live_server(byte_model) as server:
        server.complete(max_tokens=2)
        assert server.gauge(name) < 5
        server.service.worker.stop()
        stopped_at = server.gauge(name)
        wait_until(lambda: server.gauge(name) > stopped_at + 2 * IDLE_WAIT_SECONDS)


def test_accepted_connections_have_tcp_nodelay():
    with listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        connection, _ = listener.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
