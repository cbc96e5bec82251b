"""The public server: checks keys, rates, origins and bodies, answers probes, and forwards other requests."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from fastapi import FastAPI
from prometheus_client import Gauge, generate_latest

from server.app import bare_app, keys_gate, middleware
from server.errors import Rejected
from server.http.drain import Drainable
from server.http.keys import KeyRing
from server.replicas.pages import MergedPages
from server.replicas.pool import Address, NoReplica, Pool
from server.replicas.relay import Relay
from server.routes import health
from server.settings import Settings
from server.telemetry.metrics import Metrics

GATEWAY_LABEL = "front"
"""The gateway's value of the metrics label `replica`. Dashboards depend on it."""

LIST_SECONDS = 1.5
"""Timeout for listing replicas. Without it, Ray would wait for a replica that hangs."""

ANSWER_SECONDS = 2
"""Timeout for a replica's response to a probe or scrape."""


class Gateway(Drainable):
    """Forwards requests to replicas. For a probe or scrape, asks all replicas."""

    def __init__(self, pool: Pool, settings: Settings) -> None:
        self.settings = settings
        self.metrics = Metrics(settings.latency_buckets)
        self.relay = Relay(pool, self.metrics)
        self.admission = self.relay.admission
        relayed = Gauge("nvium_relayed_requests", "Requests in flight to replicas.", registry=self.metrics.registry)
        relayed.set_function(lambda: self.admission.num_present)
        self._pool = pool
        self._known: list[Address] = []

    def give_up(self) -> None:
        self.relay.give_up()

    async def check_ready(self) -> None:
        if self.admission.is_leaving or not await self._answers("/readyz"):
            raise Rejected("not_ready", "no replica is ready, or the server is shutting down")

    async def metrics_page(self) -> bytes:
        pages = {GATEWAY_LABEL: self.metrics.page().decode(), **await self._answers("/metrics")}
        return await asyncio.to_thread(generate_latest, MergedPages(pages))

    async def _answers(self, path: str) -> dict[str, str]:
        """Get a path from all replicas. Return the bodies by replica name. Omit replicas that fail or time out."""
        addresses = await self._replicas()
        requests = [asyncio.wait_for(self.relay.get(address, path), ANSWER_SECONDS) for address in addresses]
        answers = await asyncio.gather(*requests, return_exceptions=True)
        return {address.name: page for address, page in zip(addresses, answers, strict=True) if isinstance(page, str)}

    async def _replicas(self) -> list[Address]:
        """Return the current replicas. If Ray does not answer in time, return the last known replicas."""
        with suppress(TimeoutError):
            try:
                self._known = await asyncio.wait_for(self._pool.all(), LIST_SECONDS)
            except NoReplica:
                self._known = []
        return self._known


def gateway_app(gateway: Gateway, keys: KeyRing | None = None) -> FastAPI:

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with gateway.relay.opened():
            yield

    gate = keys_gate(keys or KeyRing(), gateway.settings)
    app = bare_app(lifespan, middleware(gateway.settings, gateway.metrics, gate))
    app.state.service = gateway
    app.include_router(health.router)
    app.mount("/", gateway.relay)
    return app
