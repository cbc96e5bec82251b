"""Replicas and a gateway, each in its own process. A fixed list replaces Ray."""

from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from starlette.middleware import Middleware

from server.app import assemble, load
from server.http.config import uvicorn_config
from server.http.drain import DrainingServer
from server.http.keys import KeyRing, read_keys
from server.http.listener import listen
from server.replicas import relay
from server.replicas.gateway import Gateway, gateway_app
from server.replicas.pool import Address, NoReplica
from server.replicas.relay import GatewayOnly
from server.settings import Settings
from server.telemetry.logs import configure_logs
from tests.server.forked_server import Prepare, forked_server
from tests.server.live_server import wait_until
from tests.server.server_process import ServerProcess

SECRET = "of the replicas"
READY_SECONDS = 120


def serve_replica(settings: Settings) -> None:
    """Serve as a replica in a Ray actor does."""
    configure_logs()
    with listen(settings.host, settings.port) as listener:
        service = load(settings)
        app = assemble(service, Middleware(GatewayOnly, secret=SECRET))
        config = uvicorn_config(app, settings)
        DrainingServer(config, service).run(sockets=[listener])


def serve_gateway(urls: Sequence[str], settings: Settings) -> None:
    """Serve as `nvium serve --replicas` does, but with the listed replicas."""
    configure_logs()
    with listen(settings.host, settings.port) as listener:
        gateway, keys = Gateway(ListedPool(urls), settings), KeyRing(read_keys(settings))
        config = uvicorn_config(gateway_app(gateway, keys), settings)
        DrainingServer(config, gateway).run(sockets=[listener])


class ListedPool:
    """A `Pool` of fixed replicas. Chooses the least busy one, preferably one that is not excluded."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._busy = {Address(name=url, url=url, secret=SECRET): 0 for url in urls}

    @asynccontextmanager
    async def chosen(self, excluded: Collection[str]) -> AsyncIterator[Address]:
        free = [address for address in self._busy if address.name not in excluded] or list(self._busy)
        if not free:
            raise NoReplica
        address = min(free, key=self._busy.__getitem__)
        self._busy[address] += 1
        try:
            yield address
        finally:
            self._busy[address] -= 1

    async def all(self) -> list[Address]:
        return list(self._busy)


@dataclass(frozen=True)
class Cluster(ServerProcess):
    """A gateway and its replicas."""

    replicas: tuple[ServerProcess, ...] = ()


@contextmanager
def cluster(
    model_folder: Path, log: Path, *, prepare: Prepare | None = None, num_replicas: int = 2, **options: object
) -> Iterator[Cluster]:
    """Start replicas, wait until they are ready, and start a gateway. `prepare` runs in the gateway's process."""
    own = {name: value for name, value in options.items() if name not in ("api_keys", "port")}
    with ExitStack() as stack:
        logs = [log.with_name(f"{log.name}-{number}") for number in range(num_replicas)]
        start = partial(forked_server, model_folder, serving=serve_replica, waits=False, **own)
        replicas = [stack.enter_context(start(file)) for file in logs]
        for replica in replicas:
            wait_until(lambda replica=replica: is_ready(replica), seconds=READY_SECONDS)
        gateway = stack.enter_context(gateway_of(model_folder, log, replicas, prepare=prepare, **options))
        yield Cluster(gateway.process, gateway.http, gateway.log_file, tuple(replicas))


def gateway_of(
    model_folder: Path, log: Path, replicas: Sequence[ServerProcess], **options: Any
) -> AbstractContextManager[ServerProcess]:
    """Start a gateway for running replicas."""
    serving = partial(serve_gateway, [replica.url for replica in replicas])
    return forked_server(model_folder, log, serving=serving, **options)


def is_ready(replica: ServerProcess) -> bool:
    assert replica.process.poll() is None, f"a replica ended with {replica.process.poll()}"
    try:
        return replica.http.get("/readyz", headers={relay.SECRET: SECRET}).status_code == 200
    except httpx.TransportError:
        return False
