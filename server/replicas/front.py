"""The one server that clients see: keys, rates, origins, ids, bodies and probes here, everything else at a replica."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress

from fastapi import APIRouter, FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.responses import Response

from server.app import bare_app, keys_gate, layers
from server.http.keys import KeyRing
from server.replicas.pages import merged
from server.replicas.pool import Address, NoReplica, Pool
from server.replicas.relay import Relay
from server.routes.health import Unhealthy
from server.settings import Settings
from server.telemetry.metrics import Metrics

FRONT = "front"
"""The front's own name among those of replicas."""

ASKING_SECONDS = 1.5
"""How long it may take to find out who serves, of whom one that hangs keeps Ray waiting."""

ANSWER_SECONDS = 2
"""How long a replica may take to tell something."""

LOOK_SECONDS = 5
"""Between looks at who serves."""

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
        self._known: list[Address] = []

    has_failed = False
    """It has nothing of its own that could."""

    def tick(self) -> None:
        """There is nothing to be looked after."""

    def give_up(self) -> None:
        """End what still runs: its requests fail. Called on the event loop."""
        self.relay.give_up()

    async def look_around(self) -> None:
        """Again and again, so that those whom nobody has asked yet are known too, for when another hangs."""
        while True:
            await self._replicas()
            await asyncio.sleep(LOOK_SECONDS)

    async def is_served(self) -> bool:
        """Whether any replica is ready."""
        return bool(await self._told("/readyz"))

    async def pages(self) -> dict[str, str]:
        """The metrics of all that tell them in time, the front included, by name."""
        return {FRONT: self.metrics.page().decode(), **await self._told("/metrics")}

    async def _told(self, path: str) -> dict[str, str]:
        """What replicas say in time, by name."""
        addresses = await self._replicas()
        asked = [asyncio.wait_for(self.relay.get(address, path), ANSWER_SECONDS) for address in addresses]
        told = await asyncio.gather(*asked, return_exceptions=True)
        return {address.name: page for address, page in zip(addresses, told, strict=True) if isinstance(page, str)}

    async def _replicas(self) -> list[Address]:
        """Those there are; if Ray waits for one of them, those there were, each of which can be asked by itself."""
        with suppress(TimeoutError):
            try:
                self._known = await asyncio.wait_for(self._pool.all(), ASKING_SECONDS)
                for address in self._known:
                    self.relay.watch.follow(address)
            except NoReplica:
                self._known = []
        return self._known


class RelayCollector(Collector):
    """What the front alone knows."""

    def __init__(self, relay: Relay) -> None:
        self._relay = relay

    def collect(self) -> Iterator[Metric]:
        relay = self._relay
        yield GaugeMetricFamily("nvium_relayed_requests", "Requests being passed on.", relay.admission.num_present)
        yield CounterMetricFamily("nvium_moved_requests", "Begun anew when a replica was lost.", relay.num_moved)
        yield CounterMetricFamily("nvium_broken_streams", "Ended when a replica was lost.", relay.num_broken)


def front_app(front: Front, keys: KeyRing | None = None) -> FastAPI:
    """The app around a front, for whoever has one of the keys."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with front.relay.opened():
            looking = asyncio.create_task(front.look_around())
            try:
                yield
            finally:
                looking.cancel()

    gate = keys_gate(keys or KeyRing(), front.settings, front.metrics)
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
    if front.admission.is_draining or not await front.is_served():
        raise Unhealthy("no replica is ready, or the server is shutting down", code="not_ready")
    return {"status": "ok"}


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    front: Front = request.app.state.service
    page = await asyncio.to_thread(merged, await front.pages())
    return Response(page, headers={"content-type": CONTENT_TYPE_LATEST})
