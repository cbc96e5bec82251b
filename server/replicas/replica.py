"""A replica: the ordinary server of one model, in a thread of a Ray actor, on a port known to the gateway only."""

import secrets
import threading
import time
from typing import Any

import ray
from prometheus_client import disable_created_metrics
from ray import serve
from starlette.middleware import Middleware

from nvium_core import load_mapped
from server.app import STOP_SECONDS, assemble, uvicorn_config
from server.generation.service import Service
from server.http.drain import DrainingServer
from server.http.listener import listen
from server.replicas.scaling import SEQUENCES
from server.replicas.trust import GatewayOnly
from server.settings import Settings
from server.telemetry.logs import configure_logs
from server.telemetry.tracing import tracer_provider

KEEP_ALIVE_SECONDS = 60
"""How long an unused connection of the gateway is kept."""

LOOK_SECONDS = 0.05


class Replica:
    """Made and called by Ray. `host` is where it listens; None is this machine's address in the cluster.

    Raises what `server.app.run` raises.
    """

    def __init__(self, settings: Settings, host: str | None) -> None:
        configure_logs(settings.log_level)
        disable_created_metrics()
        self._listener = listen(host or ray.util.get_node_ip_address(), port=0)
        host, port = self._listener.getsockname()[:2]
        settings = settings.model_copy(update={"host": host, "port": port})
        self._secret = secrets.token_urlsafe(32)
        loaded = load_mapped(settings.model, settings.device, settings.dtype, weights=settings.weights)
        self._service = Service(loaded, settings)
        gate = Middleware(GatewayOnly, secret=self._secret, metrics=self._service.metrics)
        app = assemble(self._service, gate, tracer_provider(settings))
        stopping = {"timeout_keep_alive": KEEP_ALIVE_SECONDS, "timeout_graceful_shutdown": STOP_SECONDS}
        config = uvicorn_config(app, settings, None, port=port, **stopping)
        self._server = DrainingServer(config, self._service)
        self._thread = threading.Thread(target=self._server.run, args=[[self._listener]], daemon=True)
        self._thread.start()
        while not self._server.started:
            if not self._thread.is_alive():
                raise RuntimeError("the server did not start")
            time.sleep(LOOK_SECONDS)
        self._service.introduce()

    _thread: threading.Thread | None = None

    def address(self) -> dict[str, str]:
        """The fields of a `pool.Address`."""
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
