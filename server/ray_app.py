"""nvium on Ray Serve, for several machines: each replica is the app of one model in an actor of Ray.

`serve run deploy/ray/serve.yaml` serves it. Ray's proxies take the connections, and Ray places and replaces replicas.
"""

import gc
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve.metrics import Gauge
from starlette.datastructures import MutableHeaders
from starlette.types import Message, Receive, Scope, Send

from server.app import create_app
from server.http.middleware import HttpMiddleware
from server.settings import read_settings


class OneRequestId(HttpMiddleware):
    """Leaves the header `x-request-id` to Ray's proxy, which adds it to every response, with the same id."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_without(message: Message) -> None:
            if message["type"] == "http.response.start":
                del MutableHeaders(scope=message)["x-request-id"]
            await send(message)

        await self.app(scope, receive, send_without)


class Nvium:
    """A replica. Ray calls `check_health` every `health_check_period_s`, and replaces a replica that fails thrice."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._nvium = create_app(**options)
        self._nvium.add_middleware(OneRequestId)
        self._gauges: dict[str, Gauge] = {}
        gc.freeze()  # garbage collection must not scan the model: that would pause all streams

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self._nvium

    async def check_health(self) -> None:
        """Do what is due, pass the metrics on to Ray, and raise `ApiError` if the engine makes no progress."""
        service = self._nvium.state.service
        service.tick()
        for family in service.metrics.registry.collect():
            for sample in family.samples:
                if sample.name not in self._gauges:
                    self._gauges[sample.name] = Gauge(sample.name, family.documentation, tuple(sample.labels))
                self._gauges[sample.name].set(sample.value, sample.labels)
        service.check_live()


replica = serve.deployment(serve.ingress()(Nvium))


def app(options: dict[str, Any]) -> Any:
    """Return Ray's application. `options` are those of `nvium serve`, such as `{"max_sequences": 64}`.

    Raise `SettingsError` if one is invalid.
    """
    read_settings(options)
    return replica.bind(options)
