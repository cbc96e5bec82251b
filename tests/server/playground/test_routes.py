"""What the page is made of, without a browser."""

import re
from pathlib import Path

import pytest

from nvium_core import LoadedModel
from server.routes.playground import ASSETS, FOLDER
from tests.server.live_server import LiveServer, live_server
from tests.server.test_refusals import error_of

REFERENCE = re.compile(r"""(?:src|href)="([^"#]+)"|from "\./([^"]+)";""")
ELSEWHERE = re.compile(r"""(?:https?:)?//[\w.-]+\.\w+|@import|url\(""")
NAMESPACE = "http://www.w3.org/2000/svg"
PATHS = ["/", *(f"/assets/{name}" for name in ASSETS)]


@pytest.mark.parametrize("path", PATHS)
def test_every_file_says_that_only_its_own_origin_is_trusted(server: LiveServer, path: str) -> None:
    response = server.http.get(path)
    assert response.status_code == 200
    policy = dict(part.split(maxsplit=1) for part in response.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == policy["frame-ancestors"] == policy["form-action"] == policy["base-uri"] == "'none'"
    assert {policy[f"{kind}-src"] for kind in ("script", "style", "img", "connect")} == {"'self'"}
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["referrer-policy"] == "no-referrer"


@pytest.mark.parametrize("path", PATHS)
def test_a_file_that_is_known_is_not_sent_again(server: LiveServer, path: str) -> None:
    first = server.http.get(path)
    tag = first.headers["etag"]
    for known in (tag, f"W/{tag}", f'"other", {tag}', "*"):
        again = server.http.get(path, headers={"if-none-match": known})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
    assert server.http.get(path, headers={"if-none-match": '"other"'}).content == first.content
    head = server.http.head(path)
    assert (head.status_code, head.content, head.headers["etag"]) == (200, b"", tag)
    assert first.headers["cache-control"] == "no-cache"


def test_files_differ_by_their_tags() -> None:
    assert len({asset.etag for asset in ASSETS.values()}) == len(ASSETS)


def test_every_file_of_the_folder_is_served_and_needed() -> None:
    assert {file.name for file in FOLDER.iterdir()} == ASSETS.keys()
    needed, found = set(), {"index.html"}
    while found - needed:
        name = (found - needed).pop()
        needed.add(name)
        for parts in REFERENCE.findall((FOLDER / name).read_text()):
            found.add(next(filter(None, parts)).removeprefix("assets/"))
    assert needed == ASSETS.keys()


@pytest.mark.parametrize("file", sorted(FOLDER.iterdir()), ids=lambda file: file.name)
def test_no_file_names_anything_elsewhere(file: Path) -> None:
    assert ELSEWHERE.findall(file.read_text().replace(NAMESPACE, "")) == []


@pytest.mark.parametrize("text", ['src="https://a.example/x.js"', "//cdn.example/x", "@import 'x'", "url(x.png)"])
def test_something_elsewhere_would_be_found(text: str) -> None:
    assert ELSEWHERE.search(text)


@pytest.mark.parametrize("name", ["nothing.js", "..%2froutes%2fplayground.py", "__init__.py", "", "page.js/"])
def test_nothing_else_is_served(server: LiveServer, name: str) -> None:
    response = server.http.get(f"/assets/{name}")
    assert response.status_code == 404
    error_of(response)


def test_without_the_playground_there_is_no_page(byte_model: LoadedModel) -> None:
    with live_server(byte_model, playground=False) as server:
        for path in PATHS:
            response = server.http.get(path)
            assert response.status_code == 404
            error_of(response)


def test_the_page_needs_no_key(byte_model: LoadedModel) -> None:
    with live_server(byte_model, api_keys="sk-a") as server:
        assert [server.http.get(path).status_code for path in PATHS] == [200] * len(PATHS)
        assert server.http.get("/v1/models").status_code == 401
