"""A real Prometheus, configured as ours, asks a real server what the panels and the rules ask."""

import math
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.deploy.conftest import complete
from tests.deploy.shipped import MONITORING, RULES, panel_queries
from tests.server.live_server import wait_until
from tests.server.server_process import ServerProcess, free_port

WINDOW = "10s"
PATIENCE_SECONDS = 60


def configuration(server: ServerProcess) -> dict[str, Any]:
    """Ours, but for the address and for seconds where there were more."""
    ours = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
    ours["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    ours["rule_files"] = [str(MONITORING / name) for name in ours["rule_files"]]
    [job] = ours["scrape_configs"]
    job["static_configs"] = [{"targets": [server.url.removeprefix("http://")]}]
    return ours


@contextmanager
def running_prometheus(server: ServerProcess, folder: Path) -> Iterator[httpx.Client]:
    program = shutil.which("prometheus") or pytest.skip("prometheus is not installed (Debian's package of that name)")
    (folder / "prometheus.yml").write_text(yaml.safe_dump(configuration(server)))
    address = f"127.0.0.1:{free_port()}"
    options = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with (folder / "prometheus.log").open("wb") as log, httpx.Client(base_url=f"http://{address}/api/v1") as http:
        process = subprocess.Popen([program, *options, f"--web.listen-address={address}"], stderr=log)
        try:
            wait_until(lambda: is_ready(http), seconds=PATIENCE_SECONDS)
            yield http
        finally:
            process.terminate()
            process.wait()


def is_ready(http: httpx.Client) -> bool:
    try:
        return http.get("/query", params={"query": "vector(1)"}).status_code == 200
    except httpx.TransportError:
        return False


@contextmanager
def load(server: ServerProcess) -> Iterator[None]:
    """Requests one after the other, for as long as it lasts."""
    is_over = threading.Event()

    def ask() -> None:
        while not is_over.is_set():
            complete(server, n=2)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@pytest.fixture(scope="module")
def prometheus(server: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    with load(server), running_prometheus(server, tmp_path_factory.mktemp("prometheus")) as http:
        yield http


def numbers(http: httpx.Client, query: str) -> list[float]:
    answer = http.get("/query", params={"query": query}).json()
    assert answer["status"] == "success", answer
    return [float(series["value"][1]) for series in answer["data"]["result"]]


def has_data(http: httpx.Client, query: str) -> bool:
    found = numbers(http, query)
    return bool(found) and all(map(math.isfinite, found))


def test_every_panel_has_something_to_show(prometheus: httpx.Client):
    empty = list(panel_queries(WINDOW))
    ends = time.monotonic() + PATIENCE_SECONDS
    while empty and time.monotonic() < ends:
        empty = [(title, target) for title, target in empty if not has_data(prometheus, target["expr"])]
        time.sleep(0.2)
    assert empty == []


def test_the_rules_can_be_evaluated_and_none_fires(prometheus: httpx.Client):
    def rules() -> list[dict[str, Any]]:
        groups = prometheus.get("/rules").json()["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]

    wait_until(lambda: all(rule["health"] != "unknown" for rule in rules()), seconds=PATIENCE_SECONDS)
    assert [(rule["name"], rule["health"]) for rule in rules()] == [(rule["alert"], "ok") for rule in RULES]
    assert {rule["name"] for rule in rules() if rule["state"] == "firing"} == set()
