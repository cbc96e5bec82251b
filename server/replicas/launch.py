"""`nvium serve --replicas N`: a Ray of this machine's own, and the front in this process."""

import logging

import ray
import structlog
from prometheus_client import disable_created_metrics
from ray import serve

from server.app import STOP_SECONDS, listen, uvicorn_config
from server.drain import DrainingServer
from server.keys import read_keys
from server.logs import configure_logs
from server.replicas.deployment import RayPool, replicas
from server.replicas.front import Front, front_app
from server.settings import Settings

APPLICATION = "nvium"
LOCAL = "127.0.0.1"

log = structlog.get_logger("nvium.server")


def run(settings: Settings) -> None:
    """Serve from several processes until SIGTERM or SIGINT, then let running requests finish.

    Raises `SettingsError` or `OSError` for settings or an address that cannot be used, `RuntimeError` for replicas
    that do not start.
    """
    configure_logs()
    disable_created_metrics()
    keys = read_keys(settings)
    with listen(settings.host, settings.port) as listener:
        start_ray(max(settings.replicas or 1, settings.max_replicas or 1))
        try:
            handle = serve.run(replicas(settings, LOCAL), name=APPLICATION, route_prefix=None)
            front = Front(RayPool(handle), settings)
            log.info("access", api_keys=len(keys), requests_per_minute=settings.requests_per_minute)
            app = front_app(front, keys)
            port = listener.getsockname()[1]
            config = uvicorn_config(app, settings, port=port, timeout_graceful_shutdown=STOP_SECONDS)
            DrainingServer(config, front).run(sockets=[listener])
        finally:
            serve.shutdown()
            ray.shutdown()


def start_ray(num_replicas: int, *, shows_logs: bool = True) -> None:
    """As many places as replicas, whatever number of processors this machine has."""
    ray.init(
        address="local",
        num_cpus=num_replicas,
        include_dashboard=False,
        configure_logging=False,
        log_to_driver=shows_logs,
    )
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    serve.start(proxy_location="Disabled", logging_config={"log_level": "WARNING", "enable_access_log": False})
