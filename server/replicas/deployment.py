"""Replicas as a Ray Serve deployment, their request router, and `nvium serve --replicas N`.

Ray health-checks, replaces and drains the replicas.
"""

import logging
import re
import secrets
import threading
import time
from collections.abc import AsyncIterator, Collection
from contextlib import ExitStack, asynccontextmanager
from typing import Any

import ray
import structlog
import torch
from prometheus_client import disable_created_metrics
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica
from ray.serve.schema import LoggingConfig
from starlette.middleware import Middleware

from server.app import assemble, load
from server.http.config import STOP_SECONDS, uvicorn_config
from server.http.drain import DrainingServer
from server.http.keys import KeyRing, read_keys
from server.http.listener import listen
from server.replicas.gateway import Gateway, gateway_app
from server.replicas.pool import Address, NoReplica, by_load
from server.replicas.reaper import reaper_of
from server.replicas.relay import GatewayOnly
from server.settings import Settings, SettingsError
from server.telemetry.logs import configure_logs

KEEP_ALIVE_SECONDS = 60
"""How long a replica keeps an idle connection of the gateway."""

START_POLL_SECONDS = 0.05
HEALTH_SECONDS = 2
"""Interval of health checks. Ray replaces a replica after three failures."""

HEALTH_TIMEOUT_SECONDS = 2.5
DRAIN_POLL_SECONDS = 0.2
APPLICATION = "nvium"
LOOPBACK = "127.0.0.1"
DESCRIPTORS_PER_CLIENT = 2
"""File descriptors per client: one for its connection, one for a connection to a replica."""

USER_ERROR = re.compile(r"^(?:nvium_core|server)\.[\w.]+: (.+)$", re.MULTILINE)
"""Matches the last line of a traceback of one of this package's exceptions."""

QUIET_LOGS = LoggingConfig(log_level="WARNING", enable_access_log=False)

log = structlog.get_logger("nvium.server")


class Replica:
    """A single-process server in a thread of a Ray actor. Only the gateway knows its port and secret.

    The constructor raises the errors that `server.app.run` raises.
    """

    def __init__(self, settings: Settings) -> None:
        configure_logs(settings.log_level)
        disable_created_metrics()
        self._listener = listen(LOOPBACK, port=0)
        _, self._port = self._listener.getsockname()
        own = {"host": LOOPBACK, "port": self._port, "http_keep_alive_seconds": KEEP_ALIVE_SECONDS}
        settings = settings.model_copy(update=own)
        self._secret = secrets.token_urlsafe(32)
        self._service = load(settings)
        gate = Middleware(GatewayOnly, secret=self._secret)
        app = assemble(self._service, gate)
        config = uvicorn_config(app, settings, port=self._port)
        self._server = DrainingServer(config, self._service)
        self._thread = threading.Thread(target=self._server.run, args=[[self._listener]], daemon=True)
        self._thread.start()
        while not self._server.started:
            if not self._thread.is_alive():
                raise RuntimeError("the server did not start")
            time.sleep(START_POLL_SECONDS)

    _thread: threading.Thread | None = None

    def record_replica_metadata(self) -> dict[str, str]:
        """Return the fields of an `Address`. Ray calls this for the gateway."""
        name = serve.get_replica_context().replica_id.unique_id
        return {"name": name, "url": f"http://{LOOPBACK}:{self._port}", "secret": self._secret}

    def check_health(self) -> None:
        """Raise if the server makes no progress. Ray calls this, and replaces a replica that keeps raising."""
        if not (self._thread and self._thread.is_alive()):
            raise RuntimeError("the server has stopped")
        self._service.check_live()

    def __del__(self) -> None:
        """Stop the server. Ray calls this after the last request, or after `__init__` failed."""
        if self._thread:
            self._server.should_exit = True
            self._thread.join(STOP_SECONDS)


class Router(RequestRouter):  # type: ignore[misc]
    """Ray's request router that leaves out lost replicas, whose names are a request's arguments."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return a least loaded replica, then the other replicas, which Ray tries if the first is full."""
        excluded = pending_request.args[0] if pending_request and pending_request.args else []
        if pending_request:
            pending_request.routing_context.should_backoff = True
        names = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        first, *others = [names[name] for name in by_load({name: self._load(names[name]) for name in names}, excluded)]
        self.on_send_request(first.replica_id)  # add this request to the replica's load
        return [[first], others]

    def _load(self, replica: RunningReplica) -> int:
        """Return the replica's last reported number of requests, plus the requests sent since."""
        return self.replica_queue_len_cache.get(replica.replica_id) or 0


def replicas(settings: Settings) -> serve.Application:
    """Define the replicas, without a gateway. Each one reserves a CPU and, if it runs on a GPU, that GPU."""
    kind = "cuda" if is_on_gpu(settings.device) else "cpu"
    gateways = {"cors_origins": (), "requests_per_minute": None, "api_keys": ()}
    own = settings.model_copy(update={**gateways, "ssl_certfile": None, "ssl_keyfile": None})
    return serve.deployment(
        Replica,
        name="Replica",
        num_replicas=settings.replicas or 1,
        request_router_config=RequestRouterConfig(request_router_class=Router),
        max_ongoing_requests=settings.engine.bounds(kind).sequences + settings.max_queue,
        graceful_shutdown_timeout_s=settings.drain_seconds,
        graceful_shutdown_wait_loop_s=DRAIN_POLL_SECONDS,
        health_check_period_s=HEALTH_SECONDS,
        health_check_timeout_s=HEALTH_TIMEOUT_SECONDS,
        ray_actor_options={"num_cpus": 1, "num_gpus": int(kind == "cuda")},
        logging_config=QUIET_LOGS,
    ).bind(own)


class RayPool:
    """A `Pool` with the replicas of one Ray deployment."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._handle = handle

    @asynccontextmanager
    async def chosen(self, excluded: Collection[str]) -> AsyncIterator[Address]:
        try:
            choosing = self._handle.choose_replica(sorted(excluded))
            selection = await choosing.__aenter__()
        except (RayError, RayServeException) as error:
            raise NoReplica from error
        try:
            yield Address(**selection.replica_metadata)
        finally:
            await choosing.__aexit__(None, None, None)

    async def all(self) -> list[Address]:
        try:
            answers = await self._handle.broadcast("record_replica_metadata").results_async(return_exceptions=True)
        except (RayError, RayServeException) as error:
            raise NoReplica from error
        return [Address(**address) for address in answers if isinstance(address, dict)]


def run(settings: Settings) -> None:
    """Serve from several processes until SIGTERM or SIGINT, then finish running requests.

    Raise `SettingsError` or `OSError` if the model, the settings or the address cannot be used.
    """
    configure_logs(settings.log_level)
    disable_created_metrics()
    keys = KeyRing(read_keys(settings))
    num_replicas = settings.replicas or 1
    check_devices(settings.device, num_replicas)
    with listen(settings.host, settings.port) as listener, ExitStack() as stack:
        start_ray(num_replicas)
        stack.enter_context(reaper_of(ray.worker.global_worker.node.get_session_dir_path()))
        try:
            gateway = Gateway(RayPool(started(settings)), settings)
            log.info("access", api_keys=len(keys), requests_per_minute=settings.requests_per_minute)
            app = gateway_app(gateway, keys)
            config = uvicorn_config(app, settings, listener=listener, descriptors_per_connection=DESCRIPTORS_PER_CLIENT)
            DrainingServer(config, gateway).run(sockets=[listener])
        finally:
            serve.shutdown()
            ray.shutdown()


def started(settings: Settings) -> DeploymentHandle[Any]:
    """Start the replicas and wait until they are ready. Raise `SettingsError` if one fails to start."""
    try:
        return serve.run(replicas(settings), name=APPLICATION, route_prefix=None)
    except RuntimeError as error:
        [deployment] = serve.status().applications[APPLICATION].deployments.values()
        errors = USER_ERROR.findall(deployment.message)
        raise SettingsError(errors[-1] if errors else "replicas: failed to start") from error


def is_on_gpu(device: str) -> bool:
    """Return whether replicas need a GPU. Ray hides GPUs from replicas that request none."""
    return device == "cuda" or (device == "auto" and torch.cuda.is_available())


def check_devices(device: str, num_replicas: int) -> None:
    """Raise `SettingsError` if there are fewer GPUs than replicas: Ray would wait for a GPU forever."""
    available = torch.cuda.device_count() if is_on_gpu(device) else num_replicas
    if available < num_replicas:
        raise SettingsError(f"replicas: {num_replicas} replicas need {num_replicas} GPUs, this machine has {available}")


def start_ray(num_replicas: int, *, shows_logs: bool = True) -> None:
    """Start Ray with as many CPUs as replicas, no matter how many CPUs the machine has."""
    ray.init(
        address="local",
        num_cpus=num_replicas,
        include_dashboard=False,
        configure_logging=False,
        log_to_driver=shows_logs,
    )
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    serve.start(proxy_location="Disabled", logging_config=QUIET_LOGS)
