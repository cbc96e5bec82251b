"""The public server: checks keys, rates, origins and bodies, answers probes, and forwards other requests.

A stream is forwarded event by event, another response when it is complete.
"""

import asyncio
import re
from collections.abc import Iterator, Mapping
from io import BytesIO

import aiohttp
import structlog
from fastapi import FastAPI
from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send
from yarl import URL

from server.admission import Admission, Drainable
from server.app import bare_app, keys_gate, middleware, serve
from server.errors import ApiError, Rejected, engine_stopped
from server.http.event_stream import broken_off, unless_disconnected
from server.http.server import listen
from server.replicas.fleet import Fleet, Replica
from server.replicas.replica import IS_LAST, KEY_ID
from server.routes import status
from server.settings import Settings
from server.telemetry.metrics import Metrics
from server.telemetry.record import RequestRecord

FORWARDED = ("accept", "content-type")
HOP_BY_HOP = (b"connection", b"date", b"keep-alive", b"server", b"transfer-encoding")
"""Response headers that are not forwarded, because the gateway's connection sets them itself."""

STOPPED, NOT_STORED = b'"code": "engine_stopped"', b'response_not_found"'
"""Text in the response of a replica whose engine has stopped, or that does not store a response."""

MAX_DELIVERIES = 3
"""Maximum number of attempts that reach a replica. If three replicas fail, the request may be the cause."""

TARGET = re.compile(rb"/[!-~]*")

log = structlog.get_logger("nvium.server")


class StoredElsewhere(Exception):
    """The replica does not store the response that the request names."""


class Exchange:
    """One client's request and the response to it."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self.body = b""
        self.has_begun = False
        """Whether the response's head has been passed to `send`."""
        self._is_stream = False
        self.record: RequestRecord = scope["state"]["record"]
        self._scope = scope
        self._send = send

    async def forward(self, replica: Replica, *, is_last: bool) -> None:
        """Forward the request and the response. Raise `aiohttp.ClientError` or `OSError` if the replica is lost.

        Raise `StoredElsewhere` if another replica may store the response that the request names, unless `is_last`.
        """
        self.record.is_passed_on = True
        query, given = self._scope["query_string"], Headers(scope=self._scope)
        target = (self._scope["raw_path"] + (b"?" + query if query else b"")).decode("latin-1")
        headers = {name: given[name] for name in FORWARDED if name in given} | ({IS_LAST: ""} if is_last else {})
        async with replica.session.request(
            self._scope["method"],
            URL(f"http://replica{target}", encoded=True),
            headers=headers | {"x-request-id": self.record.request_id, KEY_ID: self.record.key_id},
            data=BytesIO(self.body) if self.body else None,
            allow_redirects=False,
        ) as response:
            await self._send_response(response, is_last=is_last)

    async def fail(self, error: ApiError) -> None:
        """End a stream that has begun with the error, or cut off another response. Raise it if nothing has begun."""
        self.record.is_passed_on = False
        if not self.has_begun:
            raise error
        if self._is_stream:
            await self._send_events(broken_off(error, self.record))
            await self._send({"type": "http.response.body", "body": b""})
        else:
            self.record.refused(error)

    async def _send_response(self, response: aiohttp.ClientResponse, *, is_last: bool) -> None:
        self._is_stream = response.content_type == "text/event-stream"
        if not self._is_stream:
            body = await response.read()
            if response.status == 503 and STOPPED in body:
                raise ConnectionError("the engine of the replica has stopped")
            if response.status in (400, 404) and NOT_STORED in body and not is_last:
                raise StoredElsewhere
            await self._begin(response)
            await self._send({"type": "http.response.body", "body": body})
            return
        unsent = b""
        async for piece in response.content.iter_any():
            events, end, unsent = (unsent + piece).rpartition(b"\n\n")
            if end:
                if not self.has_begun:
                    await self._begin(response)
                await self._send_events(events + end)
        await self._send({"type": "http.response.body", "body": b""})

    async def _begin(self, response: aiohttp.ClientResponse) -> None:
        self.has_begun = True
        headers = [(name.lower(), value) for name, value in response.raw_headers if name.lower() not in HOP_BY_HOP]
        await self._send({"type": "http.response.start", "status": response.status, "headers": headers})

    async def _send_events(self, events: bytes) -> None:
        await self._send({"type": "http.response.body", "body": events, "more_body": True})


class Gateway(Drainable):
    """The ASGI app that forwards requests. `admission` counts open requests.

    If a replica is lost, its streams that have begun end with an error. Its other requests are retried.
    """

    def __init__(self, fleet: Fleet, settings: Settings, metrics: Metrics) -> None:
        self.fleet = fleet
        self.settings = settings
        self.metrics = metrics
        self.admission = Admission(2**31)  # no limit, because replicas limit their own queues
        self._open: set[asyncio.Timeout] = set()

    @property
    def has_failed(self) -> bool:
        return self.fleet.has_failed

    async def check_ready(self) -> None:
        if self.admission.is_leaving or not any(replica.is_ready for replica in self.fleet.replicas):
            raise Rejected("not_ready", "no replica is ready, or the server is shutting down")

    async def metrics_page(self) -> bytes:
        """Merge the pages of the gateway and the replicas, without replicas that do not answer."""
        pages = {"front": self.metrics.page().decode()}  # dashboards depend on this name
        answers = await asyncio.gather(*(replica.get("/metrics") for replica in self.fleet.replicas))
        pages |= {replica.name: page for replica, page in zip(self.fleet.replicas, answers, strict=True) if page}
        return await asyncio.to_thread(generate_latest, MergedPages(pages))

    def give_up(self) -> None:
        """Fail all open requests. Call this on the event loop."""
        for timeout in self._open:
            timeout.reschedule(0)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not TARGET.fullmatch(scope["raw_path"]):
            raise HTTPException(404)
        self.admission.enter(1)
        exchange, timeout = Exchange(scope, send), asyncio.timeout(None)
        try:
            async with timeout:
                self._open.add(timeout)
                exchange.body = (await receive())["body"]  # `Bodies` sends the whole body in one message
                await unless_disconnected(self._forward(exchange), scope, receive)
        except TimeoutError:
            await exchange.fail(engine_stopped())
        finally:
            self._open.remove(timeout)
            self.admission.leave()

    async def _forward(self, exchange: Exchange) -> bool:
        lost, num_deliveries = set[Replica](), 0
        while True:
            replica = await self.fleet.chosen(lost)
            is_last = replica in lost or len(lost) + 1 == len(self.fleet.replicas)
            replica.num_requests += 1
            try:
                await exchange.forward(replica, is_last=is_last)
                return True
            except StoredElsewhere:
                lost.add(replica)
                exchange.record.is_passed_on = False
            except (aiohttp.ClientError, OSError) as error:
                exchange.record.is_passed_on = False
                is_delivered = not isinstance(error, aiohttp.ClientConnectorError)
                num_deliveries += is_delivered
                replica.is_ready &= is_delivered  # the next probe corrects it
                lost.add(replica)
                log.warning("lost a replica", request_id=exchange.record.request_id, kind=type(error).__name__)
                if exchange.has_begun:
                    self.metrics.broken_streams.inc()
                    message = "the replica failed while it was answering"
                    await exchange.fail(ApiError(message, status=503, code="replica_lost"))
                    return True
                if num_deliveries == MAX_DELIVERIES:
                    message = f"{MAX_DELIVERIES} replicas failed while they handled this request; it is not retried"
                    raise ApiError(message, status=500, code="replicas_lost") from error
                self.metrics.moved_requests.inc()
            finally:
                replica.num_requests -= 1


class MergedPages(Collector):
    """Merges Prometheus pages, a page for each name. Each sample gets a label with its name."""

    def __init__(self, pages: Mapping[str, str]) -> None:
        self._pages = pages

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for replica, page in self._pages.items():
            for family in text_string_to_metric_families(page):
                samples = [sample._replace(labels={**sample.labels, "replica": replica}) for sample in family.samples]
                if family.name in families:
                    families[family.name].samples += samples
                else:
                    family.samples = samples
                    families[family.name] = family
        yield from families.values()


def gateway_app(gateway: Gateway) -> FastAPI:
    stack = middleware(gateway.settings, gateway.metrics, keys_gate(gateway.settings))
    app = bare_app(lambda _: gateway.fleet.running(), stack)
    app.state.service = gateway
    app.include_router(status.router)
    app.mount("/", gateway)
    return app


def run(settings: Settings) -> None:
    """Serve from several processes until SIGTERM or SIGINT, then finish running requests.

    The caller configures the logs. Raise `SettingsError` or `OSError` if the model, the settings or the address cannot
    be used.
    """
    metrics = Metrics(settings.latency_buckets)
    gateway = Gateway(Fleet(settings, metrics), settings, metrics)
    app = gateway_app(gateway)
    with listen(settings.host, settings.port) as listener:

        def started() -> Gateway:
            gateway.fleet.started.result()
            return gateway

        serve(app, listener, started, descriptors_per_connection=2)  # the client's, and one to a replica
