"""Starts Ray replicas on this machine, with the gateway in a thread of the test process."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from nvium_core import LoadedModel
from server.settings import RAY_DEFAULTS, Settings, set_defaults
from tests.server.live_server import LiveServer, live_server

APPLICATION = f"tests-{os.getpid()}"


@contextmanager
def ray_started(num_replicas: int) -> Iterator[None]:
    set_defaults(RAY_DEFAULTS)
    with warnings.catch_warnings(action="ignore"):  # raised by Ray's imports
        import ray
        from ray import serve

        from server.replicas.deployment import start_ray

        start_ray(num_replicas, shows_logs=False)
    yield
    serve.shutdown()
    ray.shutdown()


@contextmanager
def replicated(model: LoadedModel, folder: Path, **options: Any) -> Iterator[LiveServer]:
    """Run a gateway with replicas that are ready. The server's `gauge` sums a metric over all replicas."""
    from ray import serve

    from server.replicas.deployment import RayPool, replicas
    from server.replicas.gateway import Gateway, gateway_app

    handle = serve.run(replicas(Settings(model=str(folder), **options)), name=APPLICATION, route_prefix=None)

    def build(_: LoadedModel, settings: Settings) -> FastAPI:
        return gateway_app(Gateway(RayPool(handle), settings))

    try:
        with live_server(model, build=build, **options) as live:
            yield live
    finally:
        serve.delete(APPLICATION)


def replica_processes() -> list[int]:
    """Return the process ids of this test run's replicas."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process has ended
            if (process / "cmdline").read_text().startswith(f"ray::ServeReplica:{APPLICATION}:"):
                found.append(int(process.name))
    return found
