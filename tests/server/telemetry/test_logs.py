import asyncio
import logging
import sys
import threading
import warnings
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import structlog
from fastapi import FastAPI, Request
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError
from starlette.responses import StreamingResponse

from nvium_core import LoadedModel
from tests.byte_model import NAME
from tests.server.http.test_keys import bearer
from tests.server.live_server import LiveServer, live_server, wait_until
from tests.server.log_lines import LogLines, log_lines
from tests.server.raw_client import JSON as JSON_TYPE
from tests.server.raw_client import asked, error_of, request

SECRET = "the-fox-told-nobody"
KEY = "sk-never-told"
BODY: dict[str, Any] = {"model": NAME, "prompt": SECRET, "max_tokens": 3, "seed": 1, "ignore_eos": True}
FIELDS = {"request_id": "mine", "key_id": "alice", "endpoint": "completions", "level": "info", "event": "request"}


class QuotingError(Exception):
    pass


def add_failing_routes(app: FastAPI) -> None:
    @app.post("/quoting")
    async def quoting(request: Request) -> None:
        body = await request.body()
        try:
            TypeAdapter(int).validate_python(body.decode())
        except ValidationError as error:
            raise QuotingError(f"cannot use {body!r}") from error

    @app.post("/breaks-off")
    async def breaks_off(request: Request) -> StreamingResponse:
        body = await request.body()

        async def stream() -> AsyncIterator[bytes]:
            yield b"begun"
            raise QuotingError(body.decode())

        return StreamingResponse(stream())

    @app.post("/leaves-a-task")
    async def leaves_a_task(request: Request) -> None:
        body = await request.body()

        async def fails() -> None:
            raise QuotingError(body.decode())

        request.app.state.task = asyncio.create_task(fails())


@pytest.fixture(scope="module")
def watched(byte_model: LoadedModel) -> Iterator[LiveServer]:
    options = {"api_keys": f"alice:{KEY}", "requests_per_minute": 10_000, "max_body_bytes": 5000}
    with live_server(byte_model, add_failing_routes, **options) as live:
        live.http.headers.update(bearer(KEY) | {"x-request-id": "mine"})
        yield live


@contextmanager
def secretive(num_lines: int = 1) -> Iterator[LogLines]:
    """Capture log lines. At the end, wait for `num_lines` and check that they contain no secret."""
    with log_lines() as log:
        yield log
        wait_until(lambda: len(log.lines) >= num_lines)
    assert len(log.lines) == num_lines
    assert SECRET not in log.text
    assert KEY not in log.text


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_is_logged_in_one_line(watched, stream):
    with secretive() as log:
        watched.http.post("/v1/completions", json=BODY | {"stream": stream, "n": 2})
    [line] = log.lines
    assert line.items() >= FIELDS.items()
    assert (line["outcome"], line["status"], line["abort_cause"]) == ("completed", 200, None)
    assert line["finish"] == ["length", "length"]
    assert (line["prompt_tokens"], line["completion_tokens"]) == (len(SECRET), 6)
    assert sum(line["exit_counts"].values()) == 6
    assert 0 <= line["queue_seconds"] <= line["first_token_seconds"] <= line["total_seconds"]
    assert line["timestamp"].endswith("Z")


@pytest.mark.parametrize(
    ("body", "headers", "expected"),
    [
        ({"max_tokens": -2}, {}, (400, "invalid", "out_of_range")),
        ({"max_tokens": 5000}, {}, (400, "invalid", "context_length_exceeded")),
        ({"stop": [SECRET, 5]}, {}, (400, "invalid", "invalid_type")),
        ({"logit_bias": {SECRET: 1}}, {}, (400, "invalid", "out_of_range")),
        ({"model": SECRET}, {}, (404, "invalid", "model_not_found")),
        ({}, {"authorization": f"Bearer {SECRET}"}, (401, "rejected", "invalid_api_key")),
        ({"prompt": SECRET * 500}, {}, (413, "rejected", "body_too_large")),
        ({"n": 100, "prompt": [SECRET] * 20}, {}, (400, "invalid", "invalid_value")),
    ],
)
def test_a_refusal_is_logged_in_one_line_with_its_cause(watched, body, headers, expected):
    with secretive() as log:
        watched.http.post("/v1/completions", json=BODY | body, headers=headers)
    [line] = log.lines
    assert (line["status"], line["outcome"], line["abort_cause"]) == expected
    assert line["code"] == expected[2]
    assert line["param"] in (None, *body)
    assert line["key_id"] == ("" if expected[0] == 401 else "alice")
    assert line["completion_tokens"] == 0


OTHERS = {"GET /nope": (404, "unknown_url"), "POST /v1/embeddings": (404, "unknown_url")}
OTHERS |= {"PUT /v1/models": (405, "method_not_allowed")}


@pytest.mark.parametrize("target", OTHERS)
def test_a_request_to_no_named_endpoint_has_a_line_and_a_series(watched, target):
    status, code = OTHERS[target]
    series = [f'responses_total{{endpoint="other",status="{status}"}}']
    series += ['requests_total{endpoint="other",outcome="invalid"}']
    before = [watched.gauge(f"nvium_{name}") for name in series]
    with secretive() as log:
        watched.http.request(*target.split())
    [line] = log.lines
    assert (line["status"], line["outcome"], line["code"]) == (status, "invalid", code)
    assert (line["endpoint"], line["target"], line["key_id"]) == ("other", target, "alice")
    assert [watched.gauge(f"nvium_{name}") for name in series] == [before[0] + 1, before[1] + 1]


async def test_malformed_http_has_no_line(watched):
    with secretive(num_lines=0):
        assert (await asked(watched.url, b"GET /a b HTTP/1.1\r\n\r\n")).status == 400


async def test_a_body_that_breaks_off_is_one_cancelled_request(watched):
    broken = request("/v1/completions", b"{", headers=JSON_TYPE | bearer(KEY), is_chunked=True)
    with secretive() as log:
        answer = await asked(watched.url, broken.replace(b"\r\n0\r\n", b"\r\nzz\r\n"))
    [line] = log.lines
    assert (answer.status, line["endpoint"], line["outcome"]) == (400, "completions", "cancelled")


def test_probes_and_public_files_have_no_line_and_no_count_unless_they_fail(watched):
    series = [f'nvium_requests_total{{endpoint="other",outcome="{outcome}"}}' for outcome in ("completed", "invalid")]
    before = [watched.gauge(name) for name in series]
    with secretive(num_lines=2) as log:
        for path in ("/livez", "/readyz", "/", "/metrics", "/v1/models"):
            assert watched.http.get(path).status_code == 200
        watched.http.get("/assets/nope.js")
        watched.http.get("/version")
    assert [line["target"] for line in log.lines] == ["GET /assets/nope.js", "GET /version"]
    assert [watched.gauge(name) for name in series] == [before[0] + 1, before[1] + 1]


def test_a_disconnect_is_logged_with_the_tokens_generated_so_far(watched):
    body = BODY | {"max_tokens": 4000, "stream": True}
    with secretive() as log, watched.http.stream("POST", "/v1/completions", json=body) as response:
        next(response.iter_lines())
    [line] = log.lines
    assert (line["outcome"], line["abort_cause"], line["finish"]) == ("cancelled", "disconnected", [])
    assert line["completion_tokens"] > 0


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.just(SECRET),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.just(SECRET) | st.text(), inner, max_size=3),
)
FIELD_NAMES = ["prompt", "stop", "model", "user", "suffix", "nvium", "logit_bias", "stream_options", "n", SECRET]
NAMES = st.sampled_from(FIELD_NAMES)


@settings(max_examples=60)
@given(st.dictionaries(NAMES, JSON).filter(lambda fields: not isinstance(fields.get("user"), str)))
def test_no_log_line_quotes_the_body(watched, fields):
    with secretive() as log:
        watched.http.post("/v1/completions", json=BODY | fields)
    assert [line["event"] for line in log.lines] == ["request"]


def test_an_exception_is_logged_without_its_message(watched):
    with secretive(num_lines=2) as log:
        response = watched.http.post("/quoting", content=SECRET)
    assert (response.status_code, error_of(response)["code"]) == (500, "internal_error")
    [line, _] = log.lines
    assert line["request_id"] == "mine"
    assert "ValidationError" in line["exception"]
    assert line["exception"].endswith("QuotingError")
    assert 'test_logs.py", line ' in line["exception"]
    assert SECRET not in response.text


def test_the_exception_of_a_background_task_is_logged_without_its_message(watched):
    with secretive(num_lines=2) as log:
        watched.http.post("/leaves-a-task", content=SECRET)
        wait_until(watched.app.state.task.done)
        watched.app.state.task = None
    [_, line] = log.lines
    assert line["event"] == "Task exception was never retrieved"
    assert line["exception"].endswith("QuotingError")


def test_a_failure_in_a_stream_is_logged_with_the_requests_id(watched):
    with secretive(num_lines=3) as log, pytest.raises(httpx.RemoteProtocolError):
        watched.http.post("/breaks-off", content=SECRET)
    failure, _, incomplete = log.lines
    assert failure["request_id"] == "mine"
    assert failure["exception"].endswith("QuotingError")
    assert incomplete["event"] == "ASGI callable returned without completing response."


def test_lines_of_other_loggers_have_the_id_and_no_line_breaks():
    with log_lines() as log, structlog.contextvars.bound_contextvars(request_id="mine"):
        logging.getLogger("other").warning("two\nlines \x1b[31m é")
        logging.getLogger("other").info("not worth it")
        structlog.get_logger("ours").info("one\nline")
    assert [line["request_id"] for line in log.lines] == ["mine", "mine"]
    assert [line["event"] for line in log.lines] == ["two\nlines \x1b[31m é", "one\nline"]
    assert log.text.isascii()
    assert "\x1b" not in log.text


class Unclosable:
    def __del__(self) -> None:
        raise ValueError(SECRET)


def raise_error() -> None:
    raise LookupError(SECRET)


def test_the_interpreters_own_messages_are_log_lines():
    with log_lines() as written:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn("an old name", DeprecationWarning, stacklevel=1)
        thread = threading.Thread(target=raise_error)
        thread.start()
        thread.join()
        Unclosable()
        with pytest.raises(LookupError) as raised:
            raise_error()
        sys.excepthook(raised.type, raised.value, raised.tb)
        sys.excepthook(KeyboardInterrupt, KeyboardInterrupt(), None)
        [warning, in_thread, unraisable, in_main] = written.lines
    assert "DeprecationWarning: an old name" in warning["event"]
    for line, kind in ((in_thread, "LookupError"), (unraisable, "ValueError"), (in_main, "LookupError")):
        assert (line["event"], line["level"]) == ("unhandled exception", "error")
        assert line["exception"].endswith(kind)
    assert SECRET not in written.text


def test_the_engines_exceptions_keep_their_messages():
    with log_lines() as log:
        for name in ("nvium_core.engine.engine", "uvicorn.error"):
            try:
                raise RuntimeError("out of memory")
            except RuntimeError:
                logging.getLogger(name).exception("failed")
    engine, other = log.lines
    assert engine["exception"].endswith("RuntimeError: out of memory")
    assert other["exception"].endswith("RuntimeError")


def test_the_cached_tokens_of_a_prompt_are_logged_and_counted_once_for_all_its_choices(byte_model):
    with live_server(byte_model) as server:
        server.http.post("/v1/completions", json=BODY | {"prompt": "a" * 40, "logprobs": 0})
        with log_lines() as log:
            answer = server.http.post("/v1/completions", json=BODY | {"prompt": ["a" * 40, "b"], "n": 2})
            wait_until(lambda: bool(log.of(answer.headers["x-request-id"])))
        [line] = log.of(answer.headers["x-request-id"])
        assert line["cached_prompt_tokens"] == server.gauge("nvium_cached_prompt_tokens_total") == 32
