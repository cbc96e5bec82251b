"""Path prefixes behind a proxy, and HEAD requests."""

from collections.abc import Iterator

import pytest

from nvium_core import LoadedModel
from server.routes.openapi import ROUTES
from server.settings import SettingsError, read_settings
from tests.byte_model import NAME
from tests.server.live_server import LiveServer, live_server


@pytest.fixture(scope="module")
def behind_proxy(byte_model: LoadedModel) -> Iterator[LiveServer]:
    with live_server(byte_model, root_path="/llm/", api_keys="sk-a") as server:
        yield server


@pytest.mark.parametrize("path", [route.path for route in ROUTES if route.method == "get"])
def test_head_works_wherever_get_does(server: LiveServer, path: str) -> None:
    got, head = (
        server.http.request(method, path.format(model_id=NAME, response_id="resp_none")) for method in ("GET", "HEAD")
    )
    assert (head.status_code, head.content) == (got.status_code, b"")
    assert head.headers["content-type"] == got.headers["content-type"]
    if path != "/metrics":
        assert head.headers["content-length"] == got.headers["content-length"]


def test_head_is_refused_where_only_post_works(server: LiveServer) -> None:
    assert server.http.head("/v1/completions").status_code == 405


@pytest.mark.parametrize("prefix", ["", "/llm"])
def test_a_proxy_may_keep_or_remove_its_prefix(behind_proxy: LiveServer, prefix: str) -> None:
    assert behind_proxy.http.get(f"{prefix}/livez").status_code == 200
    assert behind_proxy.http.get(f"{prefix}/v1/models").status_code == 401
    key = {"x-api-key": "sk-a"}
    assert behind_proxy.http.get(f"{prefix}/v1/models", headers=key).status_code == 200
    document = behind_proxy.http.get(f"{prefix}/openapi.json", headers=key).json()
    assert document["servers"] == [{"url": "/llm"}]
    assert behind_proxy.http.get("/llmv1/models", headers=key).status_code == 404


@pytest.mark.parametrize("path", ["llm", "/a b", "/a//b", "/a?b", "/%2e"])
def test_an_invalid_root_path_is_refused(path: str) -> None:
    with pytest.raises(SettingsError, match=r"^root_path: must be a path"):
        read_settings({"root_path": path})
