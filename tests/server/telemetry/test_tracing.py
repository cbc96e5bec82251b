import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
from fastapi import FastAPI, Request
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from nvium_core import LoadedModel
from server.app import assemble, keys_gate
from server.generation.service import Service
from server.http.keys import KeyRing, read_keys
from server.http.middleware import JsonBodies
from server.settings import Settings, SettingsError
from server.telemetry.metrics import Metrics
from server.telemetry.record import RequestRecord
from server.telemetry.tracing import phases, tracer_provider
from tests.byte_model import NAME
from tests.server.http.test_keys import bearer
from tests.server.live_server import LiveServer, live_server, wait_until
from tests.server.server_process import server_process

SECRET = "the-fox-told-nobody"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PHASES = ["queue", "prefill", "decode"]
BODY: dict[str, Any] = {"model": NAME, "prompt": SECRET, "max_tokens": 8, "seed": 1, "ignore_eos": True}


class Spans:
    """Collects the spans that a provider exports."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider(shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))

    def take(self) -> tuple[ReadableSpan, list[ReadableSpan]]:
        """Return and remove the span of the only request, and its child spans."""
        wait_until(lambda: any(span.kind is SpanKind.SERVER for span in self.exporter.get_finished_spans()))
        spans = self.exporter.get_finished_spans()
        self.exporter.clear()
        [request] = [span for span in spans if span.kind is SpanKind.SERVER]
        inner = [span for span in spans if span is not request]
        for span in inner:
            assert span.parent
            assert span.parent.span_id == request.context.span_id
            assert span.context.trace_id == request.context.trace_id
        return request, inner


def build(provider: TracerProvider, model: LoadedModel, settings: Settings) -> FastAPI:
    service = Service(model, settings)
    return assemble(service, keys_gate(KeyRing(read_keys(settings)), settings), provider)


@contextmanager
def traced_server(model: LoadedModel, **options: Any) -> Iterator[tuple[LiveServer, Spans]]:
    spans = Spans()
    with live_server(model, build=partial(build, spans.provider), **options) as server:
        yield server, spans


@pytest.fixture(scope="module")
def traced(byte_model: LoadedModel) -> Iterator[tuple[LiveServer, Spans]]:
    with traced_server(byte_model) as both:
        yield both


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 3])
def test_a_request_is_a_span_with_its_phases_as_children(traced, stream, n):
    server, spans = traced
    before = time.time_ns()
    response = server.http.post("/v1/completions", json=BODY | {"stream": stream, "n": n})
    request, inner = spans.take()

    assert [span.name for span in inner] == PHASES
    bounds = [span.start_time for span in inner] + [inner[-1].end_time]
    assert [span.end_time for span in inner] == bounds[1:]
    moments = [before, request.start_time, *bounds, request.end_time, time.time_ns()]
    assert moments == sorted(moments)

    attributes = dict(request.attributes)
    exits = {name: attributes.pop(name) for name in list(attributes) if name.startswith("nvium.exit_counts.")}
    assert attributes.pop("gen_ai.usage.cache_read.input_tokens") in (0, 16)  # depends on earlier tests
    assert attributes.pop("nvium.request_id") == response.headers["x-request-id"]
    assert attributes == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "nvium",
        "gen_ai.request.model": NAME,
        "gen_ai.response.model": NAME,
        "gen_ai.response.finish_reasons": ("length",) * n,
        "gen_ai.usage.input_tokens": len(SECRET),
        "gen_ai.usage.output_tokens": 8 * n,
        "http.response.status_code": 200,
        "nvium.outcome": "completed",
    }
    assert sum(exits.values()) == 8 * n
    if not stream:
        counts = response.json()["nvium"]["exit_counts"]
        assert exits == {f"nvium.exit_counts.{number}": c for number, c in enumerate(counts, start=1) if c}
    assert request.name == f"text_completion {NAME}"
    assert request.status.status_code is StatusCode.UNSET
    assert SECRET not in "".join(span.to_json() for span in (request, *inner))


def test_a_request_belongs_to_the_clients_trace(traced):
    server, spans = traced
    server.http.post("/v1/completions", json=BODY, headers={"traceparent": f"00-{TRACE}-{PARENT}-01"})
    request, inner = spans.take()
    assert f"{request.context.trace_id:032x}" == TRACE
    assert request.parent
    assert f"{request.parent.span_id:016x}" == PARENT
    assert len(inner) == 3


def test_a_refused_request_is_a_span_without_phases(byte_model):
    with traced_server(byte_model, api_keys="alice:sk-a") as (server, spans):
        for body, key, status, cause in (
            (BODY, "sk-b", 401, "invalid_api_key"),
            (BODY | {"n": 0}, "sk-a", 400, "out_of_range"),
            (BODY | {"model": SECRET}, "sk-a", 404, "model_not_found"),
        ):
            server.http.post("/v1/completions", json=body, headers=bearer(key))
            request, inner = spans.take()
            assert inner == []
            attributes = dict(request.attributes)
            assert (attributes["http.response.status_code"], attributes["nvium.abort_cause"]) == (status, cause)
            assert attributes.get("nvium.key_id") == (None if status == 401 else "alice")
            assert not any(name.startswith(("gen_ai.usage", "gen_ai.request", "error")) for name in attributes)
            assert request.status.status_code is StatusCode.UNSET
            assert SECRET not in request.to_json()


def test_a_disconnect_ends_the_current_phase(traced):
    server, spans = traced
    with server.http.stream("POST", "/v1/completions", json=BODY | {"max_tokens": 4000, "stream": True}) as response:
        next(response.iter_lines())
    request, inner = spans.take()
    assert [span.name for span in inner] == PHASES
    assert inner[-1].end_time == request.end_time
    assert dict(request.attributes)["nvium.abort_cause"] == "disconnected"
    assert request.status.status_code is StatusCode.UNSET


def test_a_failed_request_is_an_error_span(byte_model):
    with traced_server(byte_model) as (server, spans):
        with server.http.stream("POST", "/v1/completions", json=BODY | {"max_tokens": 4000, "stream": True}) as stream:
            lines = stream.iter_lines()
            next(lines)
            server.service.worker.stop()
            list(lines)
        request, inner = spans.take()
    assert request.status.status_code is StatusCode.ERROR
    assert dict(request.attributes)["error.type"] == "engine_stopped"
    assert [span.name for span in inner] == PHASES


def test_probes_and_lists_are_not_traced(traced):
    server, spans = traced
    for path in ("/livez", "/metrics", "/v1/models", "/nope"):
        server.http.get(path)
    assert not spans.exporter.get_finished_spans()


@pytest.mark.parametrize(
    ("status", "cause", "reached", "expected"),
    [
        (200, None, 4, [("queue", 1, 2), ("prefill", 2, 3), ("decode", 3, 4)]),
        (200, "disconnected", 4, [("queue", 1, 2), ("prefill", 2, 3), ("decode", 3, 9)]),
        (200, "internal_error", 4, [("queue", 1, 2), ("prefill", 2, 3), ("decode", 3, 9)]),
        (200, "disconnected", 2, [("queue", 1, 2), ("prefill", 2, 9)]),
        (None, None, 1, [("queue", 1, 9)]),
        (503, "deadline_exceeded", 1, [("queue", 1, 9)]),
        (503, "queue_full", 0, []),
        (400, "invalid_request_error", 0, []),
        (200, None, 1, []),
    ],
)
def test_an_aborted_requests_last_phase_lasts_until_its_end(status, cause, reached, expected):
    record = RequestRecord(Metrics([1.0]), request_id="mine", endpoint="completions")
    moments = [("queued_at", 1), ("started_at", 2), ("first_token_at", 3), ("last_token_at", 4)]
    for name, seconds in [*moments[:reached], ("closed_at", 9)]:
        setattr(record, name, record.arrived_at + seconds)
    record.status, record.abort_cause = status, cause
    at = record.arrived_at
    assert [(name, round(start - at), round(end - at)) for name, start, end in phases(record)] == expected


@pytest.mark.parametrize("ending", ["", "/", "/v1/traces"])
def test_spans_are_exported_to_the_configured_endpoint(byte_model, ending, monkeypatch):
    monkeypatch.setattr(JsonBodies, "TAKEN_FOR_JSON", ("", "application/x-protobuf"))  # the collector is an app of ours
    received: list[bytes] = []

    def collect(app: FastAPI) -> None:
        @app.post("/v1/traces")
        async def traces(request: Request) -> None:
            received.append(await request.body())

    with live_server(byte_model, collect) as collector:
        provider = tracer_provider(Settings(otlp_endpoint=collector.url + ending))
        assert isinstance(provider, TracerProvider)
        with live_server(byte_model, build=partial(build, provider)) as server:
            server.http.post("/v1/completions", json=BODY)
        provider.shutdown()
    [message] = received
    [resource] = ExportTraceServiceRequest.FromString(message).resource_spans
    service = {pair.key: pair.value.string_value for pair in resource.resource.attributes}["service.name"]
    names = [span.name for scope in resource.scope_spans for span in scope.spans]
    assert (service, sorted(names)) == ("nvium", ["decode", "prefill", "queue", f"text_completion {NAME}"])


def test_an_endpoint_without_the_sdk_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk", None)
    with pytest.raises(SettingsError, match=r"^otlp_endpoint: .*nvium\[tracing\]"):
        tracer_provider(Settings(otlp_endpoint="http://localhost:4318"))


def test_a_failing_export_of_traces_shows_no_password(model_folder, tmp_path):
    endpoint = f"http://user:{SECRET}@127.0.0.1:9"
    with server_process(model_folder, tmp_path, otlp_endpoint=endpoint, drain_seconds=1) as server:
        assert server.http.post("/v1/completions", json=BODY | {"model": "default"}).status_code == 200
        server.terminate()
        server.exit_code(60)
        assert "otlp" in server.log().lower() or "export" in server.log().lower()
        assert SECRET not in server.log()
