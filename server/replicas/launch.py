"""`nvium serve --replicas N`: a local Ray, and the gateway in this process."""

import logging
import re
from contextlib import ExitStack
from typing import Any

import ray
import structlog
import torch
from prometheus_client import disable_created_metrics
from ray import serve
from ray.serve.handle import DeploymentHandle

from server.app import STOP_SECONDS, uvicorn_config
from server.http.drain import DrainingServer
from server.http.keys import KeyRing, read_keys
from server.http.listener import listening
from server.http.renewal import Renewal
from server.http.tls import tls_context
from server.replicas.deployment import RayPool, replicas
from server.replicas.gateway import Gateway, gateway_app
from server.replicas.reaper import reaper_of
from server.settings import Settings, SettingsError
from server.telemetry.logs import configure_logs

APPLICATION = "nvium"
LOCAL = "127.0.0.1"

OF_EACH_CLIENT = 2
"""Descriptors of a client: its connection, and one to a replica."""

COMPLAINT = re.compile(r"^(?:nvium_core|server)\.[\w.]+: (.+)$", re.MULTILINE)
"""The last line of a traceback for a user's mistake."""

log = structlog.get_logger("nvium.server")


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
    with listening(settings) as listener, ExitStack() as stack:
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


def started(settings: Settings) -> "DeploymentHandle[Any]":
    """The replicas, once they are ready. Raises `SettingsError` with a replica's error."""
    try:
        return serve.run(replicas(settings, LOCAL), name=APPLICATION, route_prefix=None)
    except RuntimeError as error:
        [deployment] = serve.status().applications[APPLICATION].deployments.values()
        complaints = COMPLAINT.findall(deployment.message)
        raise SettingsError(complaints[-1] if complaints else "replicas: did not start") from error


def check_devices(device: str, num_replicas: int) -> None:
    """Raise `SettingsError` if there are fewer GPUs than replicas, which would wait forever."""
    available = torch.cuda.device_count() if device == "cuda" else num_replicas
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
