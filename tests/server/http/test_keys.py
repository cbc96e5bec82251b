from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.http.access import ApiKey, KeyGate, owner, parse_key, read_keys
from server.routes.openapi import document
from server.settings import Settings, SettingsError, read_settings
from server.telemetry.metrics import Metrics
from server.telemetry.record import RequestRecord
from tests.byte_model import NAME, load_byte_model
from tests.server.live_server import create_app, live_server, server_fixture, wait_until
from tests.server.log_lines import log_lines
from tests.server.raw_client import asked, error_of, request

Headers = Iterable[tuple[str, str]]

FIRST, SECOND = "sk-first-0123", "sk-second-4567"
SECRET = "sk-never-told"
METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "FROBNICATE"]
PUBLIC = ["/", "/livez", "/readyz", "/health", "/assets/page.js"]
ODD_TARGETS = ["//", "//livez", "/livez/", "/LIVEZ", "/./livez", "/health/../v1/models", "//assets/x", "*"]
ODD_TARGETS += ["/%2e%2e/v1/models", "/v1/%6dodels", "/v1/models%3f/livez", "/v1/models;/livez", "/v1//models"]
ODD_TARGETS += ["/v1/completions%00", "http://x/v1/models?/livez"]
NO_KEYS = ["", "Bearer", "Bearer ", FIRST, f"Basic {FIRST}", f"Bearer{FIRST}", f"Bearer {FIRST}x", "Bearer é"]
NO_KEYS += [f"Bearer {FIRST[:-1]}", f"Bearer {FIRST.upper()}", f"Bearer alice:{FIRST}", f"Bearer {FIRST} {FIRST}"]
NO_KEYS += [f"Bearer {FIRST},{SECOND}", f"Bearer\t{FIRST}", "Bearer " + "x" * 10_000]
NO_KEYS += [f"Bearer {sha256(FIRST.encode()).hexdigest()}"]


async def called(
    app: ASGIApp, method: str, path: str, headers: Headers = (), key_id: str = "", record: RequestRecord | None = None
) -> list[Message]:
    """Call an app and return the messages that it sends. Fail if the app reads the body."""
    sent: list[Message] = []

    async def receive() -> Message:
        raise AssertionError("the body was read")

    async def send(message: Message) -> None:
        sent.append(message)

    record = record or RequestRecord(Metrics([1.0]), request_id="mine")
    record.key_id = key_id
    raw = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers]
    scope: Scope = {"type": "http", "method": method, "path": path, "headers": raw, "state": {"record": record}}
    await app(scope, receive, send)
    return sent


@dataclass
class Reached:
    """An app that records the state of each request that reaches it."""

    states: list[dict[str, Any]] = field(default_factory=list)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.states.append(dict(scope["state"]))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def whose(request: Request) -> str:
    return request.state.record.key_id


KEYS = f"alice:{FIRST},{SECOND}"
closed = server_fixture(lambda: live_server(load_byte_model(), lambda app: app.get("/whose")(whose), api_keys=KEYS))


def test_every_path_and_method_needs_a_key_unless_it_is_public(closed):
    known = list(document()["paths"])
    assert "/v1/completions" in known
    assert "/metrics" in known
    for path in [*known, *PUBLIC]:
        for method in METHODS:
            status = closed.http.request(method, path.replace("{model_id}", NAME)).status_code
            is_public = path in PUBLIC and method in ("GET", "HEAD")
            assert (status != 401) if is_public else (status == 401), (method, path, status)


@pytest.mark.parametrize("target", ODD_TARGETS)
async def test_no_spelling_of_a_path_avoids_the_key(closed, target):
    for method in METHODS:
        assert (await asked(closed.url, request(target, method=method), method)).status == 401


def test_x_api_key_is_accepted_but_not_two_keys(closed):
    assert closed.http.get("/whose", headers={"x-api-key": FIRST}).json() == "alice"
    assert closed.http.get("/whose", headers={"x-api-key": "sk-none"}).status_code == 401
    assert closed.http.get("/whose", headers={"x-api-key": FIRST, **bearer(FIRST)}).status_code == 401
    assert closed.http.get("/whose", headers=[("x-api-key", FIRST), ("x-api-key", SECOND)]).status_code == 401


def test_a_refusal_has_the_error_form_and_is_counted(closed):
    rejected = closed.service.metrics.rejected.labels("invalid_api_key")._value
    before = rejected.get()
    for response in (closed.complete(), closed.http.get("/v1/models"), closed.http.get("/nope", headers=bearer("no"))):
        error = error_of(response)
        assert response.status_code == 401
        assert (error["code"], error["param"]) == ("invalid_api_key", None)
        assert response.headers["www-authenticate"] == "Bearer"
    assert rejected.get() == before + 3


async def test_a_refusal_comes_before_the_body_is_read(closed):
    head = request("/v1/completions", b" " * 1_000_000)[:-1_000_000]
    assert (await asked(closed.url, head)).status == 401


@pytest.mark.parametrize("authorization", NO_KEYS)
async def test_an_invalid_key_is_refused(closed, authorization):
    headers = {"authorization": authorization}
    assert (await asked(closed.url, request("/v1/models", method="GET", headers=headers))).status == 401


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER", "Bearer  "])
def test_a_key_opens_every_route_and_identifies_its_owner(closed, scheme):
    alice, other = ({"authorization": f"{scheme} {key}"} for key in (FIRST, SECOND))
    assert closed.http.get("/whose", headers=alice).json() == "alice"
    assert closed.http.get("/whose", headers=other).json() == sha256(SECOND.encode()).hexdigest()[:8]
    assert closed.http.get("/metrics", headers=other).status_code == 200


@pytest.mark.parametrize("metrics_open", [True, False])
async def test_metrics_open_makes_metrics_public(metrics_open):
    layer = KeyGate(Reached(), [parse_key("here", FIRST)], metrics_open)

    async def status(method: str, path: str, headers: Headers = ()) -> int:
        return (await called(layer, method, path, headers))[0]["status"]

    assert await status("GET", "/metrics") == (200 if metrics_open else 401)
    assert await status("POST", "/metrics") == 401
    assert await status("GET", "/metrics/x") == 401
    assert await status("GET", "/metrics", bearer(FIRST).items()) == 200


KEY = st.text(st.sampled_from([chr(code) for code in range(33, 127) if chr(code) not in ":#,"]), min_size=1)


@given(st.lists(KEY, unique=True, max_size=8), KEY)
def test_only_known_keys_have_an_owner(keys, stranger):
    known = [parse_key("here", f"user-{number}:{key}") for number, key in enumerate(keys)]
    assert [owner(known, key) for key in keys] == [f"user-{number}" for number, _ in enumerate(keys)]
    assert (owner(known, stranger) is None) == (stranger not in keys)


def test_a_key_file_has_a_key_per_line_with_names_and_comments(tmp_path):
    file = tmp_path / "keys"
    file.write_text(f"# who may in\n\n  alice: {FIRST}   # until spring\nbob:sk-b\r\nsk-c\n", "utf-8-sig")
    keys = read_keys(Settings(api_keys_file=file, api_keys="alice:sk-new"))
    assert [key.id for key in keys] == ["alice", "alice", "bob", sha256(b"sk-c").hexdigest()[:8]]
    assert keys[1] == ApiKey("alice", sha256(FIRST.encode()).digest())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"api_keys": ""}, "api_keys, entry 1: the key is empty"),
        ({"api_keys": "sk-secret,,b"}, "api_keys, entry 2: the key is empty"),
        ({"api_keys": "sk-secret,x:sk-secret"}, "api_keys, entry 2: the same key as api_keys, entry 1"),
        ({"api_keys": "alice:"}, "api_keys, entry 1: must be"),
        ({"api_keys": "al ice:sk-secret"}, "api_keys, entry 1: must be"),
        ({"api_keys": "a:b:sk-secret"}, "api_keys, entry 1: must be"),
        ({"api_keys": "sk secret"}, "api_keys, entry 1: must be"),
        ({"api_keys": "sk-secretü"}, "api_keys, entry 1: must be"),
        ({"api_keys": [5]}, "api_keys, entry 1: must be a string"),
        ({"api_key": "sk-secret"}, "api_key"),
        ({"api_keys_file": "no-such-file"}, "api_keys_file: cannot read no-such-file: No such file"),
        ({"api_keys_file": "."}, "api_keys_file: cannot read .: Is a directory"),
        ({"api_keys_file": b"# nobody yet\n\n   # none\n"}, "api_keys_file.* contains no keys"),
        ({"api_keys_file": b"sk-a\nsk-secret\n\nname: sk-secret"}, "api_keys_file.*, line 4: the same key .*, line 2"),
        ({"api_keys_file": b"\xff\xfe"}, "api_keys_file.* is not UTF-8 text"),
        ({"api_keys_file": b"sk-a\nname:  # forgotten\n"}, "api_keys_file.*, line 2: must be"),
        ({"api_keys_file": b"sk-secret#comment"}, "api_keys_file.*, line 1: must be"),
    ],
)
def test_errors_about_keys_name_the_place_but_not_the_key(tmp_path, given, message):
    """Bytes are the content of a key file."""
    content = given.get("api_keys_file")
    if isinstance(content, bytes):
        given = {"api_keys_file": tmp_path / "keys"}
        given["api_keys_file"].write_bytes(content)
    with pytest.raises(SettingsError, match=f"^{message}") as refused:
        read_keys(read_settings(given))
    assert "secret" not in str(refused.value) + repr(refused.value.__cause__)


def test_settings_keys_and_the_app_show_no_secret(byte_model):
    settings = Settings(api_keys=f"alice:{SECRET}")
    app = create_app(byte_model, Settings(api_keys=SECRET))
    shown = [repr(settings), str(settings), repr(settings.model_dump(mode="json"))]
    shown += [repr(read_keys(settings)), repr(parse_key("here", SECRET)), repr(app.user_middleware)]
    assert SECRET not in "".join(shown)


def test_responses_metrics_and_log_lines_show_no_key(byte_model):
    with live_server(byte_model, api_keys=f"alice:{SECRET}") as server, log_lines() as log:
        answers = [
            server.http.request(*route.split(), headers=bearer(key), json={"model": SECRET + "x"})
            for key in (SECRET, f"{SECRET}-almost")
            for route in ("POST /v1/completions", "GET /v1/models", "GET /metrics", "GET /no")
        ]
        wait_until(lambda: len(log.lines) >= 2)
    shown = [answer.text.replace(SECRET + "x", "") + str(answer.headers) for answer in answers]
    assert all(SECRET not in text for text in shown)
    assert SECRET not in log.text
