"""Runs the real app on a real socket, in a thread of the test process."""

import math
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import httpx
import openai
import pytest
import uvicorn
from fastapi import FastAPI

from nvium_core import LoadedModel
from nvium_core.engine.schedule.step import Step, StepResult
from server.app import assemble, keys_gate
from server.generation.service import Service
from server.http.server import listen, uvicorn_config
from server.settings import Settings
from tests.byte_model import NAME, load_byte_model

Build = Callable[[LoadedModel, Settings], FastAPI]
REPLICA = re.compile(r',?replica="[^"]*"')


@dataclass(frozen=True)
class LiveServer:
    url: str
    app: FastAPI
    http: httpx.Client
    listener: socket.socket

    @property
    def service(self) -> Service:
        return self.app.state.service

    def client(self, *, strict: bool = True) -> openai.OpenAI:
        how = {"max_retries": 0, "_strict_response_validation": strict}
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", **how)

    def complete(self, **body: Any) -> httpx.Response:
        return self.http.post("/v1/completions", json={"model": NAME, "prompt": "Once", "seed": 1, **body})

    def chat(self, text: str = "Hello", **body: Any) -> httpx.Response:
        messages = [{"role": "user", "content": text}]
        return self.http.post("/v1/chat/completions", json={"model": NAME, "messages": messages, "seed": 1, **body})

    def gauge(self, name: str) -> float:
        """Return the value of a metric, given with its labels, summed over all replicas."""
        lines = REPLICA.sub("", self.http.get("/metrics").text).replace("{}", "").splitlines()
        values = [float(line.split()[-1]) for line in lines if line.startswith(f"{name} ")]
        assert values, f"no series {name}"
        return sum(values)


def create_app(model: LoadedModel, settings: Settings) -> FastAPI:
    return assemble(Service(model, settings), keys_gate(settings))


@contextmanager
def live_server(
    model: LoadedModel, /, prepare: Callable[[FastAPI], Any] = bool, build: Build = create_app, **options: Any
) -> Iterator[LiveServer]:
    settings = Settings(**options)
    app = build(model, settings)
    prepare(app)
    if isinstance(app.state.service, Service):
        app.state.service.start()
    listener = listen(settings.host, port=0)
    config = uvicorn_config(app, settings)
    config.timeout_graceful_shutdown = 1
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=[[listener]])
    thread.start()
    wait_until(lambda: server.started, seconds=60)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        with httpx.Client(base_url=url, timeout=30) as http:
            yield LiveServer(url, app, http, listener)
    finally:
        server.should_exit = True
        thread.join()


def slowed_down(server: LiveServer, num_steps: float = math.inf) -> LiveServer:
    """Let the engine run one token per Step, with a pause before each Step, and fail after `num_steps`."""
    runner, numbers = server.service.engine.runner, count()

    def slowly(step: Step) -> StepResult:
        time.sleep(0.05)
        if next(numbers) >= num_steps:
            raise RuntimeError("out of order")
        return type(runner).run(runner, replace(step, limit=1))

    runner.run = slowly
    return server


def server_fixture(made: Callable[[], AbstractContextManager[LiveServer]], scope: Any = "module") -> Any:
    """Return a fixture: a server that the tests of a module, or of another scope, share."""

    @pytest.fixture(scope=scope)
    def served() -> Iterator[LiveServer]:
        with made() as server:
            yield server

    return served


@contextmanager
def template_server(chat_template: str) -> Iterator[LiveServer]:
    """Serve the byte model with this chat template."""
    model = load_byte_model()
    model.tokenizer.chat_template = chat_template
    with live_server(model) as server:
        yield server


def wait_until(condition: Callable[[], bool], seconds: float = 30) -> float:
    """Wait until the condition is true and return the seconds that took. Fail after `seconds`."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < seconds, f"the condition is still false after {seconds} s"
        time.sleep(0.01)
    return time.monotonic() - started
