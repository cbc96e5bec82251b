"""Ray deployments: autoscaled replicas, and for a cluster a gateway beside them."""

from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import LoggingConfig
from starlette.types import ASGIApp

from server.http.keys import KeyRing, read_keys
from server.replicas.gateway import Gateway, gateway_app
from server.replicas.pool import Address, NoReplica
from server.replicas.replica import Replica
from server.replicas.router import AffineRouter
from server.replicas.scaling import BySequences
from server.settings import Settings
from server.telemetry.logs import configure_logs

HEALTH_SECONDS = 2
"""Between health checks of a replica, which is replaced after three failures."""

HEALTH_TIMEOUT_SECONDS = 2.5
LOOK_BACK_SECONDS = 15
"""The window over which the number of sequences is averaged."""

DRAIN_LOOK_SECONDS = 0.2
MAX_GATEWAY_REQUESTS = 10_000
"""At one gateway at a time; more wait at Ray's proxy."""

GATEWAY_CPUS = 0
"""A gateway is light and fits wherever a replica does."""


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
        ray_actor_options={"num_cpus": 1, "num_gpus": 1 if settings.device == "cuda" else 0},
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
