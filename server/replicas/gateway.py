"""The public server: checks keys, rates, origins and bodies, answers probes, and forwards other requests."""

import asyncio
from collections.abc import Iterator, Mapping

from fastapi import FastAPI
from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from server.admission import Drainable
from server.app import bare_app, keys_gate, middleware, serve
from server.errors import Rejected
from server.http.config import listen
from server.replicas.fleet import Fleet
from server.replicas.relay import Relay
from server.routes import health
from server.settings import Settings
from server.telemetry.metrics import Metrics

GATEWAY_LABEL = "front"
"""The gateway's value of the metrics label `replica`. Dashboards depend on it."""

DESCRIPTORS_PER_CLIENT = 2
"""File descriptors per client: one for its connection, one for a connection to a replica."""


class Gateway(Drainable):
    def __init__(self, fleet: Fleet, settings: Settings, metrics: Metrics) -> None:
        self.fleet = fleet
        self.settings = settings
        self.metrics = metrics
        self.relay = Relay(fleet, metrics)
        self.admission = self.relay.admission

    @property
    def has_failed(self) -> bool:
        return self.fleet.has_failed

    def give_up(self) -> None:
        self.relay.give_up()

    async def check_ready(self) -> None:
        if self.admission.is_leaving or not any(replica.is_ready for replica in self.fleet.replicas):
            raise Rejected("not_ready", "no replica is ready, or the server is shutting down")

    async def metrics_page(self) -> bytes:
        """Merge the pages of the gateway and the replicas, without replicas that do not answer."""
        pages = {GATEWAY_LABEL: self.metrics.page().decode()}
        answers = await asyncio.gather(*(replica.get("/metrics") for replica in self.fleet.replicas))
        pages |= {replica.name: page for replica, page in zip(self.fleet.replicas, answers, strict=True) if page}
        return await asyncio.to_thread(generate_latest, MergedPages(pages))


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
    app.include_router(health.router)
    app.mount("/", gateway.relay)
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

        serve(app, listener, started, descriptors_per_connection=DESCRIPTORS_PER_CLIENT)
