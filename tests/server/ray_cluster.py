"""Nodes of Ray on this machine: each has a loopback address of its own and room for one replica."""

import copy
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import yaml

from tests.deploy.test_ray import SERVE_CONFIG, VARIABLES
from tests.server.server_process import descendants, free_port, name_of

PROGRAMS = Path(sys.executable).parent
HEAD = "127.0.0.2"
KEY = "sk-ray"
STORE_BYTES = 100_000_000
REPLICA = "ray::ServeReplica:nvium:Nvium"


def environment(folder: Path) -> dict[str, str]:
    """Return the variables of every node: the manifest's, a token, and for workers the tests' own priority."""
    token = folder / "token"
    token.write_text("a" * 32)
    own = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), "RAY_worker_niceness": "0"}
    return {**os.environ, **VARIABLES, **own, "RAY_USAGE_STATS_ENABLED": "0", "NVIUM_API_KEYS": f"tester:{KEY}"}


class Node:
    """A node and its processes."""

    def __init__(self, address: str, folder: Path, variables: dict[str, str], options: list[str]) -> None:
        self.metrics_url = f"http://127.0.0.1:{(port := free_port())}/metrics"
        command = [PROGRAMS / "ray", "start", "--block", "--num-cpus=1", f"--node-ip-address={address}"]
        command += [f"--metrics-export-port={port}", f"--object-store-memory={STORE_BYTES}"]
        command += ["--include-log-monitor=false", *options]
        with (folder / address).open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=variables)
        self._log = folder / address

    @property
    def has_started(self) -> bool:
        assert self._process.poll() is None, self._log.read_text()
        return "Ray runtime started" in self._log.read_text()

    def replicas(self) -> set[int]:
        """Return the process ids of replicas that have started."""
        return {pid for pid in descendants(self._process.pid) if name_of(pid).startswith(REPLICA)}

    def kill(self) -> None:
        for pid in [*descendants(self._process.pid), self._process.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()


class RayCluster:
    """Three nodes with the app of `serve.yaml`. Its proxy listens at `url`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._variables = environment(folder)
        self._gcs = f"{HEAD}:{free_port()}"
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self.nodes: list[Node] = []

    def add_node(self) -> Node:
        address = f"127.0.0.{len(self.nodes) + 2}"
        options = [f"--address={self._gcs}"]
        if not self.nodes:
            ports = [f"--dashboard-port={free_port()}", f"--ray-client-server-port={free_port()}"]
            options = ["--head", f"--port={self._gcs.split(':')[1]}", f"--temp-dir={self._folder}", *ports]
            options += ["--include-dashboard=false", "--no-monitor"]
        self.nodes.append(Node(address, self._folder, self._variables, options))
        return self.nodes[-1]

    def replicas(self) -> set[int]:
        return {replica for node in self.nodes for replica in node.replicas()}

    def deploy(self, scaling: dict[str, int], **options: object) -> None:
        """Deploy `serve.yaml` with one proxy, one CPU for each replica, and an autoscaler that adds one at once."""
        config = copy.deepcopy(SERVE_CONFIG)
        config |= {"proxy_location": "HeadOnly", "http_options": {"host": "127.0.0.1", "port": self._port}}
        [application] = config["applications"]
        [deployment] = application["deployments"]
        application["args"] |= options
        deployment["ray_actor_options"]["num_cpus"] = 1
        at_once = {"target_ongoing_requests": 1, "upscale_delay_s": 0, "metrics_interval_s": 1, "look_back_period_s": 2}
        deployment["autoscaling_config"] |= {"min_replicas": 1, "max_replicas": 2, **at_once, **scaling}
        (self._folder / "serve.yaml").write_text(yaml.safe_dump(config))
        command = [PROGRAMS / "serve", "run", "--non-blocking", f"--address={self._gcs}", self._folder / "serve.yaml"]
        done = subprocess.run(command, capture_output=True, text=True, env=self._variables, check=False)
        assert done.returncode == 0, done.stderr


@contextmanager
def ray_cluster(folder: Path) -> Iterator[RayCluster]:
    cluster = RayCluster(folder)
    try:
        yield cluster
    finally:
        for node in cluster.nodes:
            node.kill()
