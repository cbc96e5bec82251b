"""The page's files, without a browser."""

import re

from server.routes.playground import FOLDER
from tests.server.live_server import live_server
from tests.server.raw_client import error_of

REFERENCE = re.compile(r"""(?:src|href)="([^"#]+)"|from "\./([^"]+)";""")
ASSETS = {file.name for file in FOLDER.iterdir()}
PATHS = ["/", *(f"/assets/{name}" for name in ASSETS)]


def test_the_policy_of_every_file_allows_only_its_own_origin(server):
    for path in PATHS:
        headers = server.http.get(path).raise_for_status().headers
        policy = dict(part.split(maxsplit=1) for part in headers["content-security-policy"].split("; "))
        nothing = {policy[name] for name in ("default-src", "frame-ancestors", "form-action", "base-uri")}
        assert nothing == {"'none'"}, path
        assert {policy[f"{kind}-src"] for kind in ("script", "style", "img", "connect")} == {"'self'"}, path
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"


def test_a_cached_file_is_not_sent_again(server):
    for path in PATHS[1:]:
        first = server.http.get(path)
        tag = first.headers["etag"]
        for known in (tag, f"W/{tag}", f'"other", {tag}', "*"):
            again = server.http.get(path, headers={"if-none-match": known})
            assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
        assert server.http.get(path, headers={"if-none-match": '"other"'}).content == first.content
        head = server.http.head(path)
        assert (head.status_code, head.content, head.headers["etag"]) == (200, b"", tag)
        assert first.headers["cache-control"] == "no-cache"


def test_every_file_of_the_folder_is_served_and_used():
    needed, found = set(), {"index.html"}
    while found - needed:
        name = (found - needed).pop()
        needed.add(name)
        for parts in REFERENCE.findall((FOLDER / name).read_text()):
            found.add(next(filter(None, parts)).removeprefix("assets/"))
    assert needed == ASSETS


def test_other_files_are_not_served(server):
    for name in ("nothing.js", "..%2froutes%2fplayground.py", "__init__.py", "", "page.js/"):
        response = server.http.get(f"/assets/{name}")
        assert response.status_code == 404
        error_of(response)


def test_without_the_playground_there_is_no_page(byte_model):
    with live_server(byte_model, playground=False) as server:
        for path in PATHS:
            response = server.http.get(path)
            assert response.status_code == 404
            error_of(response)
