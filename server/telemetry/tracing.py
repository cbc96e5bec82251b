"""OpenTelemetry traces: a span per recorded request, with child spans for queue, prefill and decode.

Spans are created from the request's record when the request ends. They contain no text. Names follow OpenTelemetry's
conventions for generative AI; other attributes begin with `nvium.`.
"""

from collections.abc import Iterator

from opentelemetry.trace import SpanKind, Status, StatusCode, TracerProvider, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue
from starlette.datastructures import Headers

from server.settings import Settings, SettingsError
from server.telemetry.record import RequestRecord

SERVICE = "nvium"
TRACES = "/v1/traces"
EXPORT_SECONDS = 3
"""Timeout for exporting a batch, with retries. The process exports up to four batches at exit."""

OPERATIONS = {"completions": "text_completion", "chat_completions": "chat"}
"""OpenTelemetry's names of endpoints. Other endpoints keep their own name."""


def tracer_provider(settings: Settings) -> TracerProvider | None:
    """Return a provider that exports spans to the configured endpoint in the background, and the rest at exit.

    Return None without an endpoint. Raise `SettingsError` if OpenTelemetry's SDK is not installed.
    """
    if settings.otlp_endpoint is None:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk import trace as sdk
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise SettingsError(f"otlp_endpoint: needs `pip install 'nvium[tracing]'` ({error})") from error
    provider = sdk.TracerProvider(resource=Resource.create({"service.name": SERVICE}))
    url = settings.otlp_endpoint.rstrip("/").removesuffix(TRACES) + TRACES
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(url, timeout=EXPORT_SECONDS)))
    return provider


class Tracing:
    def __init__(self, provider: TracerProvider) -> None:
        self._tracer = provider.get_tracer(SERVICE)

    def trace(self, record: RequestRecord, headers: Headers, model: str) -> None:
        """Export a finished request to a served model as part of the trace that its `traceparent` header names."""
        assert record.closed_at is not None
        operation = OPERATIONS.get(record.endpoint, record.endpoint)
        request = self._tracer.start_span(
            f"{operation} {model}",
            context=TraceContextTextMapPropagator().extract(headers),
            kind=SpanKind.SERVER,
            attributes=attributes_of(record, model, operation),
            start_time=unix_ns(record, record.arrived_at),
        )
        if record.outcome == "failed":
            request.set_status(Status(StatusCode.ERROR))
        context = set_span_in_context(request)
        for name, start, end in phases(record):
            phase = self._tracer.start_span(name, context=context, start_time=unix_ns(record, start))
            phase.end(unix_ns(record, end))
        request.end(unix_ns(record, record.closed_at))


def attributes_of(record: RequestRecord, model: str, operation: str) -> dict[str, AttributeValue]:
    """Return all attributes that are not None. A request that was not queued has no model and no usage."""
    known: dict[str, AttributeValue | None] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": SERVICE,
        "http.response.status_code": record.status,
        "error.type": record.abort_cause if record.outcome == "failed" else None,
        "nvium.abort_cause": record.abort_cause,
        "nvium.request_id": record.request_id,
        "nvium.key_id": record.key_id or None,
        "nvium.outcome": record.outcome,
    }
    if record.queued_at is not None:
        known |= {
            "gen_ai.request.model": model,
            "gen_ai.response.model": model,
            "gen_ai.response.finish_reasons": record.finish_reasons,
            "gen_ai.usage.input_tokens": record.num_prompt_tokens,
            "gen_ai.usage.cache_read.input_tokens": record.num_cached_prompt_tokens,
            "gen_ai.usage.output_tokens": record.exit_counts.total(),
        }
        known |= {f"nvium.exit_counts.{number}": count for number, count in sorted(record.exit_counts.items())}
    return {name: value for name, value in known.items() if value is not None}


def phases(record: RequestRecord) -> Iterator[tuple[str, float, float]]:
    """Yield the name, start and end of each phase of a request, by the record's clock.

    A completed request decodes until its last token. The last phase of an aborted request lasts until the request ends.
    A request that only scored its prompt has no phases.
    """
    assert record.closed_at is not None
    is_complete = record.outcome == "completed"
    if is_complete and record.first_token_at is None:
        return
    starts = (record.queued_at, record.started_at, record.first_token_at)
    end = record.last_token_at if is_complete and record.last_token_at else record.closed_at
    for name, start, following in zip(("queue", "prefill", "decode"), starts, (*starts[1:], None), strict=True):
        if start is not None:
            yield name, start, max(start, end if following is None else following)


def unix_ns(record: RequestRecord, moment: float) -> int:
    return record.arrived_unix_ns + round((moment - record.arrived_at) * 1e9)
