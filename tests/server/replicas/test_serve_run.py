"""`serve run server.ray_app:app`, as on a cluster, called through Ray's proxy."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import httpx
import openai
import pytest

from tests.server.live_server import wait_until
from tests.server.server_process import free_port

READY_SECONDS = 180
"""By default Ray replaces a proxy that is not ready after five seconds, which never ends on a busy machine."""
SERVE = "from ray.serve.scripts import cli; cli()"


@pytest.fixture(scope="module")
def url(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if find_spec("ray") is None:
        pytest.skip("Ray is not installed: pip install 'nvium[ray]'")
    folder, port = tmp_path_factory.mktemp("serve"), free_port()
    config = folder / "serve.json"
    application = {"name": "nvium", "route_prefix": "/", "import_path": "server.ray_app:app"}
    options = {"host": "127.0.0.1", "port": port}
    config.write_text(json.dumps({"http_options": options, "applications": [application]}))
    command = [sys.executable, "-c", SERVE, "run", "--address", "local", str(config)]
    environment = os.environ | {
        "NVIUM_MODEL": str(model_folder),
        "NVIUM_REPLICAS": "2",
        "RAY_worker_niceness": "0",
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": str(READY_SECONDS),
    }
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    try:
        wait_until(lambda: process.poll() is not None or is_ready(port), seconds=READY_SECONDS)
        assert process.poll() is None, (folder / "log").read_text()
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=60)
        process.kill()


def is_ready(port: int) -> bool:
    with suppress(httpx.TransportError):
        return httpx.get(f"http://127.0.0.1:{port}/readyz").status_code == httpx.codes.OK
    return False


@pytest.mark.slow
def test_an_openai_client_streams_through_rays_proxy(url: str) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        [model] = client.models.list().data
        asked = {"model": model.id, "prompt": "Once", "max_tokens": 24, "seed": 5}
        whole = client.completions.create(**asked)
        chunks = list(client.completions.create(**asked, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    assert sum(len(chunk.choices[0].nvium["exits"]) for chunk in chunks if chunk.choices) == 24  # type: ignore[attr-defined]


@pytest.mark.slow
def test_errors_and_metrics_are_those_of_the_server(url: str) -> None:
    refused = httpx.post(f"{url}/v1/completions", json={"model": "default", "prompt": "Once", "max_tokens": -2})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_tokens")
    wait_until(lambda: httpx.get(f"{url}/metrics").text.count("nvium_requests_running{replica=") == 2, seconds=60)
