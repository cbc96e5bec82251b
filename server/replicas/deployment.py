"""Replicas as Ray deployments, the router that chooses among them, and `nvium serve --replicas N`.

The only module that knows Ray, which scales, checks, replaces and drains the replicas.
"""

import logging
import random
import re
import secrets
import threading
import time
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import ExitStack, asynccontextmanager
from typing import Any

import ray
import structlog
import torch
from prometheus_client import disable_created_metrics
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica
from ray.serve.schema import LoggingConfig
from starlette.middleware import Middleware
from starlette.types import ASGIApp

from server.app import STOP_SECONDS, assemble, load, uvicorn_config
from server.http.drain import DrainingServer
from server.http.keys import KeyRing, read_keys
from server.http.listener import listen
from server.http.renewal import Renewal
from server.http.tls import tls_context
from server.replicas.gateway import Gateway, gateway_app
from server.replicas.reaper import reaper_of
from server.replicas.relay import GatewayOnly
from server.replicas.routing import SEQUENCES, Address, BySequences, NoReplica, PrefixHolders, preferred
from server.settings import Settings, SettingsError
from server.telemetry.logs import configure_logs
from server.telemetry.tracing import tracer_provider

KEEP_ALIVE_SECONDS = 60
"""How long an unused connection of the gateway is kept."""

LOOK_SECONDS = 0.05
HEALTH_SECONDS = 2
"""Between health checks of a replica, which is replaced after three failures."""

HEALTH_TIMEOUT_SECONDS = 2.5
LOOK_BACK_SECONDS = 15
"""The window over which the number of sequences is averaged."""

DRAIN_LOOK_SECONDS = 0.2
MAX_GATEWAY_REQUESTS = 10_000
"""Requests at one gateway at a time; more wait at Ray's proxy."""

GATEWAY_CPUS = 0
"""A gateway is light and fits wherever a replica does."""

APPLICATION = "nvium"
LOCAL = "127.0.0.1"
OF_EACH_CLIENT = 2
"""Descriptors of a client: its connection, and one to a replica."""

COMPLAINT = re.compile(r"^(?:nvium_core|server)\.[\w.]+: (.+)$", re.MULTILINE)
"""The last line of a traceback for a user's mistake."""

log = structlog.get_logger("nvium.server")


class Replica:
    """The ordinary server of one model, in a thread of a Ray actor, on a port known to the gateway only.

    `host` is where it listens; None is this machine's address in the cluster.

    Raises what `server.app.run` raises.
    """

    def __init__(self, settings: Settings, host: str | None) -> None:
        configure_logs(settings.log_level)
        disable_created_metrics()
        self._listener = listen(host or ray.util.get_node_ip_address(), port=0)
        host, port = self._listener.getsockname()[:2]
        settings = settings.model_copy(
            update={"host": host, "port": port, "http_keep_alive_seconds": KEEP_ALIVE_SECONDS}
        )
        self._secret = secrets.token_urlsafe(32)
        self._service = load(settings)
        gate = Middleware(GatewayOnly, secret=self._secret, metrics=self._service.metrics)
        app = assemble(self._service, gate, tracer_provider(settings))
        config = uvicorn_config(app, settings, None, port=port, timeout_graceful_shutdown=STOP_SECONDS)
        self._server = DrainingServer(config, self._service)
        self._thread = threading.Thread(target=self._server.run, args=[[self._listener]], daemon=True)
        self._thread.start()
        while not self._server.started:
            if not self._thread.is_alive():
                raise RuntimeError("the server did not start")
            time.sleep(LOOK_SECONDS)

    _thread: threading.Thread | None = None

    def address(self) -> dict[str, str]:
        """The fields of an `Address`."""
        host, port = self._listener.getsockname()[:2]
        name = serve.get_replica_context().replica_id.unique_id
        return {"name": name, "url": f"http://{f'[{host}]' if ':' in host else host}:{port}", "secret": self._secret}

    def record_replica_metadata(self) -> dict[str, Any]:
        """What the gateway gets when it chooses this replica."""
        return self.address()

    def record_autoscaling_stats(self) -> dict[str, float]:
        return {SEQUENCES: self._service.admission.num_present}

    def check_health(self) -> None:
        """Raises if the replica must be replaced."""
        if not (self._thread and self._thread.is_alive() and self._service.is_live):
            raise RuntimeError("the device thread makes no progress")

    def __del__(self) -> None:
        """Called after the last request, or after `__init__` failed."""
        if self._thread:
            self._server.should_exit = True
            self._thread.join(STOP_SECONDS)


class AffineRouter(RequestRouter):  # type: ignore[misc]
    """A request's arguments are its prefixes (`routing.beginnings`) and the names of excluded replicas."""

    def initialize_state(self, *, is_affine: bool = True) -> None:
        """Called once by Ray, before the first request."""
        self._is_affine = is_affine
        self._prefixes = PrefixHolders()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The preferred one first, then the others in case it is full."""
        beginnings, excluded = pending_request.args if pending_request and pending_request.args else ([], [])
        if pending_request:
            pending_request.routing_context.should_backoff = True
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        for name in excluded if replicas.keys() - set(excluded) else ():
            replicas.pop(name, None)
        loads = {name: self._load(replicas[name]) for name in random.sample(list(replicas), len(replicas))}
        chosen = preferred(beginnings, self._prefixes.by_prefix, loads)
        if self._is_affine:
            self._prefixes.note(beginnings, chosen)
        first = replicas.pop(chosen)
        self.on_send_request(first.replica_id)  # counts before the replica reports its load
        return [[first], list(replicas.values())]

    def _load(self, replica: RunningReplica) -> int:
        """The replica's load: requests that it last reported, and those sent since."""
        return self.replica_queue_len_cache.get(replica.replica_id) or 0


def replicas(settings: Settings, host: str | None = None) -> serve.Application:
    """The replicas alone, listening at `host`. Each has one CPU, and on a GPU that GPU for itself."""
    least = settings.replicas or 1
    own = settings.model_copy(update={"cors_origins": (), "requests_per_minute": None, "api_keys": ()})
    return serve.deployment(
        Replica,
        name="Replica",
        autoscaling_config=AutoscalingConfig(
            min_replicas=least,
            max_replicas=max(least, settings.max_replicas or least),
            upscale_delay_s=settings.upscale_seconds,
            downscale_delay_s=settings.downscale_seconds,
            look_back_period_s=LOOK_BACK_SECONDS,
            policy=AutoscalingPolicy(
                policy_function=BySequences, policy_kwargs={"sequences_per_replica": settings.sequences_per_replica}
            ),
        ),
        request_router_config=RequestRouterConfig(
            request_router_class=AffineRouter, request_router_kwargs={"is_affine": settings.prefix_affinity}
        ),
        max_ongoing_requests=settings.max_sequences + settings.max_queue,
        graceful_shutdown_timeout_s=settings.drain_seconds,
        graceful_shutdown_wait_loop_s=DRAIN_LOOK_SECONDS,
        health_check_period_s=HEALTH_SECONDS,
        health_check_timeout_s=HEALTH_TIMEOUT_SECONDS,
        ray_actor_options={"num_cpus": 1, "num_gpus": int(is_on_gpu(settings.device))},
        logging_config=LoggingConfig(log_level="WARNING", enable_access_log=False),
    ).bind(own, host)


def application(settings: Settings) -> serve.Application:
    """The replicas behind a gateway, which gets its requests from Ray's proxy."""
    deployment = serve.deployment(
        serve.ingress()(IngressGateway),
        name="Front",
        max_ongoing_requests=MAX_GATEWAY_REQUESTS,
        graceful_shutdown_timeout_s=settings.drain_seconds,
        graceful_shutdown_wait_loop_s=DRAIN_LOOK_SECONDS,
        ray_actor_options={"num_cpus": GATEWAY_CPUS},
        logging_config=LoggingConfig(log_level="WARNING", enable_access_log=False),
    )
    return deployment.bind(settings, replicas(settings))


class IngressGateway:
    def __init__(self, settings: Settings, handle: DeploymentHandle[Any]) -> None:
        configure_logs(settings.log_level)
        self._app = gateway_app(Gateway(RayPool(handle), settings), KeyRing(read_keys(settings)))

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return self._app


class RayPool:
    """The replicas of a deployment."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._handle = handle

    @asynccontextmanager
    async def chosen(self, beginnings: Sequence[bytes], excluded: Collection[str]) -> AsyncIterator[Address]:
        try:
            choosing = self._handle.choose_replica(list(beginnings), sorted(excluded))
            selection = await choosing.__aenter__()
        except (RayError, RayServeException) as error:
            raise NoReplica from error
        try:
            yield Address(**selection.replica_metadata)
        finally:
            await choosing.__aexit__(None, None, None)

    async def all(self) -> list[Address]:
        try:
            answers = await self._handle.broadcast("address").results_async(return_exceptions=True)
        except (RayError, RayServeException) as error:
            raise NoReplica from error
        return [Address(**address) for address in answers if isinstance(address, dict)]


def run(settings: Settings) -> None:
    """Serve from several processes until SIGTERM or SIGINT, then finish running requests.

    Raises `SettingsError` or `OSError` for an unusable model, settings or address.
    """
    configure_logs(settings.log_level)
    disable_created_metrics()
    keys, tls = KeyRing(read_keys(settings)), tls_context(settings)
    most = max(settings.replicas or 1, settings.max_replicas or 1)
    check_devices(settings.device, most)
    (renewal := Renewal(settings, keys, tls)).listen()
    with listen(settings.host, settings.port) as listener, ExitStack() as stack:
        start_ray(most)
        stack.enter_context(reaper_of(session_folder()))
        try:
            gateway = Gateway(RayPool(started(settings)), settings)
            log.info("access", api_keys=len(keys), requests_per_minute=settings.requests_per_minute)
            app = gateway_app(gateway, keys)
            more = {"listener": listener, "timeout_graceful_shutdown": STOP_SECONDS}
            config = uvicorn_config(app, settings, tls, descriptors_each=OF_EACH_CLIENT, **more)
            DrainingServer(config, gateway, renewal).run(sockets=[listener])
        finally:
            serve.shutdown()
            ray.shutdown()


def started(settings: Settings) -> DeploymentHandle[Any]:
    """The replicas, once they are ready. Raises `SettingsError` with a replica's error."""
    try:
        return serve.run(replicas(settings, LOCAL), name=APPLICATION, route_prefix=None)
    except RuntimeError as error:
        [deployment] = serve.status().applications[APPLICATION].deployments.values()
        complaints = COMPLAINT.findall(deployment.message)
        raise SettingsError(complaints[-1] if complaints else "replicas: did not start") from error


def is_on_gpu(device: str) -> bool:
    """Ray hides GPUs from replicas that ask for none."""
    return device == "cuda" or (device == "auto" and torch.cuda.is_available())


def check_devices(device: str, num_replicas: int) -> None:
    """Raise `SettingsError` if there are fewer GPUs than replicas, which would wait forever."""
    available = torch.cuda.device_count() if is_on_gpu(device) else num_replicas
    if available < num_replicas:
        raise SettingsError(f"replicas: {num_replicas} of them need a GPU each, and this machine has {available}")


def session_folder() -> str:
    """The session's folder, which is on the command lines of all processes of this Ray."""
    folder: str = ray.worker.global_worker.node.get_session_dir_path()
    return folder


def start_ray(num_replicas: int, *, shows_logs: bool = True) -> None:
    """With as many CPUs as replicas, whatever this machine has."""
    ray.init(
        address="local",
        num_cpus=num_replicas,
        include_dashboard=False,
        configure_logging=False,
        log_to_driver=shows_logs,
    )
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    serve.start(proxy_location="Disabled", logging_config={"log_level": "WARNING", "enable_access_log": False})
