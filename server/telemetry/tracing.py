"""OpenTelemetry traces: a span for each recorded request, with spans for queue, prefill and decode. Holds no text.

Spans are made at a request's end from the times in its record, so requests that are not traced cost nothing. Names
follow OpenTelemetry's conventions for generative AI; attributes beyond those begin with `nvium.`.
"""

from collections.abc import Iterator

from opentelemetry.context import Context
from opentelemetry.trace import (
    ProxyTracerProvider,
    SpanKind,
    Status,
    StatusCode,
    TracerProvider,
    get_tracer_provider,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue
from starlette.datastructures import Headers

from server.settings import Settings, SettingsError
from server.telemetry.record import RequestRecord

SERVICE = "nvium"
TRACES = "/v1/traces"
EXPORT_SECONDS = 3
"""How long exporting a batch may take, retries included; at its end the process waits for up to four batches."""

OPERATIONS = {"completions": "text_completion", "chat_completions": "chat"}
"""The conventions' names of our endpoints."""

Attributes = dict[str, AttributeValue]
Phase = tuple[str, float, float]


def tracer_provider(settings: Settings) -> TracerProvider | None:
    """A provider for the endpoint in the settings, else the process's own provider, else None.

    Raises `SettingsError` for an endpoint without the SDK.
    """
    if settings.otlp_endpoint:
        return exporting_to(settings.otlp_endpoint)
    configured = get_tracer_provider()
    return None if isinstance(configured, ProxyTracerProvider) else configured


def exporting_to(endpoint: str) -> TracerProvider:
    """A provider that exports spans in the background, and the rest when the process ends."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk import trace as sdk
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise SettingsError(f"otlp_endpoint: needs `pip install 'nvium[tracing]'` ({error})") from error
    provider = sdk.TracerProvider(resource=Resource.create({"service.name": SERVICE}))
    url = endpoint.rstrip("/").removesuffix(TRACES) + TRACES
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(url, timeout=EXPORT_SECONDS)))
    return provider


class Tracing:
    """`model` is the served model's name."""

    def __init__(self, provider: TracerProvider, model: str) -> None:
        self._tracer = provider.get_tracer(SERVICE)
        self._model = model

    def trace(self, record: RequestRecord, headers: Headers) -> None:
        """Export a finished request as part of the trace in its `traceparent`."""
        assert record.closed is not None
        operation = OPERATIONS.get(record.endpoint, record.endpoint)
        request = self._tracer.start_span(
            f"{operation} {self._model}",
            context=TraceContextTextMapPropagator().extract(headers),
            kind=SpanKind.SERVER,
            attributes={"gen_ai.operation.name": operation, "gen_ai.provider.name": SERVICE} | self._attributes(record),
            start_time=unix_ns(record, record.arrived),
        )
        if record.outcome == "failed":
            request.set_status(Status(StatusCode.ERROR))
        for name, start, end in phases(record):
            self._phase(name, unix_ns(record, start), unix_ns(record, end), set_span_in_context(request))
        request.end(unix_ns(record, record.closed))

    def _phase(self, name: str, start_ns: int, end_ns: int, context: Context) -> None:
        self._tracer.start_span(name, context=context, start_time=start_ns).end(end_ns)

    def _attributes(self, record: RequestRecord) -> Attributes:
        """The known attributes; none of a model or of tokens if nothing was queued."""
        known: dict[str, AttributeValue | None] = {
            "http.response.status_code": record.status,
            "error.type": record.abort_cause if record.outcome == "failed" else None,
            "nvium.abort_cause": record.abort_cause,
            "nvium.request_id": record.request_id,
            "nvium.key_id": record.key_id or None,
            "nvium.outcome": record.outcome,
        }
        if record.queued is not None:
            known |= self._usage(record)
        return {name: value for name, value in known.items() if value is not None}

    def _usage(self, record: RequestRecord) -> dict[str, AttributeValue | None]:
        exits = {f"nvium.exit_counts.{number}": count for number, count in sorted(record.exit_counts.items())}
        return {
            "gen_ai.request.model": self._model,
            "gen_ai.response.model": self._model,
            "gen_ai.response.finish_reasons": record.finish_reasons,
            "gen_ai.usage.input_tokens": record.num_prompt_tokens,
            "gen_ai.usage.cache_read.input_tokens": record.num_cached_prompt_tokens,
            "gen_ai.usage.output_tokens": record.exit_counts.total(),
            **exits,
        }


def phases(record: RequestRecord) -> Iterator[Phase]:
    """The phases of a request, by the record's clock.

    An aborted request stays in its last phase until its end. A completed one decodes until its last token; the rest is
    writing. If it only scored its prompt, without emitting tokens, its phases are not known.
    """
    assert record.closed is not None
    is_whole = record.outcome == "completed"
    if is_whole and record.spoke is None:
        return
    starts = (record.queued, record.left, record.spoke)
    end = record.last_told if is_whole and record.last_told else record.closed
    for name, start, following in zip(("queue", "prefill", "decode"), starts, (*starts[1:], None), strict=True):
        if start is not None:
            yield name, start, max(start, end if following is None else following)


def unix_ns(record: RequestRecord, moment: float) -> int:
    """A time of the record's clock as Unix time."""
    return record.arrived_unix_ns + round((moment - record.arrived) * 1e9)
