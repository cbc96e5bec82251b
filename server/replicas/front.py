"""The one server that clients see: keys, rates, origins, ids, bodies and probes here, everything else at a replica."""

import asyncio
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import asynccontextmanager

from fastapi import APIRouter, FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.responses import Response

from server.app import bare_app, keys_gate, layers
from server.keys import Key
from server.metrics import Metrics
from server.replicas.pages import merged
from server.replicas.pool import Address, NoReplica, Pool
from server.replicas.relay import Relay
from server.routes.health import Unhealthy
from server.settings import Settings

FRONT = "front"
"""The front's own name among those of replicas."""

ANSWER_SECONDS = 5
"""How long it may take to find out who serves, and a replica to tell its metrics."""

router = APIRouter()


class Front:
    """Passes requests on, and answers for all replicas together."""

    def __init__(self, pool: Pool, settings: Settings) -> None:
        self.settings = settings
        self.relay = Relay(pool)
        self.admission = self.relay.admission
        self.metrics = Metrics([1.0], settings.latency_buckets)
        self.metrics.registry.register(RelayCollector(self.relay))
        self._pool = pool

    def give_up(self) -> None:
        """End what still runs: its requests fail. Called on the event loop."""
        self.relay.give_up()

    async def replicas(self) -> list[Address]:
        """Those that serve now."""
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                return await self._pool.all()
        except (NoReplica, TimeoutError):
            return []

    async def pages(self) -> dict[str, str]:
        """The metrics of all that tell them in time, the front included, by name."""
        addresses = await self.replicas()
        asked = [asyncio.wait_for(self.relay.get(address, "/metrics"), ANSWER_SECONDS) for address in addresses]
        told = await asyncio.gather(*asked, return_exceptions=True)
        pages = {address.name: page for address, page in zip(addresses, told, strict=True) if isinstance(page, str)}
        return {FRONT: self.metrics.page().decode(), **pages}


class RelayCollector(Collector):
    """What the front alone knows."""

    def __init__(self, relay: Relay) -> None:
        self._relay = relay

    def collect(self) -> Iterator[Metric]:
        relay = self._relay
        yield GaugeMetricFamily("nvium_relayed_requests", "Requests being passed on.", relay.admission.num_present)
        yield CounterMetricFamily("nvium_moved_requests", "Begun anew when a replica was lost.", relay.num_moved)
        yield CounterMetricFamily("nvium_broken_streams", "Ended when a replica was lost.", relay.num_broken)


def front_app(front: Front, keys: Collection[Key] = ()) -> FastAPI:
    """The app around a front, for whoever has one of the keys."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with front.relay.opened():
            yield

    gate = keys_gate(keys, front.settings, front.metrics)
    app = bare_app(lifespan, layers(front.settings, front.metrics, gate))
    app.state.service = front
    app.include_router(router)
    app.mount("/", front.relay)
    return app


@router.get("/livez")
async def livez() -> dict[str, str]:
    return {"status": "ok"}


@router.get("/readyz")
@router.get("/health")
async def readyz(request: Request) -> dict[str, str]:
    front: Front = request.app.state.service
    if front.admission.is_draining or not await front.replicas():
        raise Unhealthy("no replica is ready, or the server is shutting down", code="not_ready")
    return {"status": "ok"}


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    front: Front = request.app.state.service
    page = await asyncio.to_thread(merged, await front.pages())
    return Response(page, headers={"content-type": CONTENT_TYPE_LATEST})
