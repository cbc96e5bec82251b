"""Smoke tests of libraries that many programs reach OpenAI's API through."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.conftest import Record
from tests.conformance.programs import CLIENTS, installed, pinned, run
from tests.conformance.serving import Served

MAX_TOKENS = 12

pytestmark = pytest.mark.conformance


def seen_by(script: str, server: Served) -> Any:
    """The last line that a client of ours written with that library prints."""
    python = installed(CLIENTS / "bin" / "python")
    finished = run([python, Path(__file__).with_name(script), server.api, server.model], seconds=120)
    assert finished.exit_code == 0
    return json.loads(finished.output.splitlines()[-1])


def test_langchain_completes_chats_streams_and_maps_errors(server: Served, record: Record) -> None:
    seen = seen_by("langchain_client.py", server)
    record("langchain-openai", pinned("langchain-openai"), requests=6)
    assert seen["completion"]
    assert seen["completion_stream"] == seen["completion"]
    assert seen["chat_stream"] == seen["chat"]
    assert seen["chat_finish"] in ("stop", "length")
    assert 0 < seen["chat_usage"][1] <= MAX_TOKENS
    assert seen["chat_stream_usage"] == seen["chat_usage"]
    assert seen["error"][:3] == ["OpenAIModelNotFoundError", 404, "model_not_found"]
    assert seen["refused"] == ["OpenAIInvalidRequestError", 400, None, "temperature"]


def test_litellm_completes_chats_streams_and_maps_errors(server: Served, record: Record) -> None:
    seen = seen_by("litellm_client.py", server)
    record("litellm", pinned("litellm"), requests=6)
    assert seen["completion"]
    assert seen["completion_stream"] == seen["completion"]
    assert 0 < seen["completion_usage"][1] <= MAX_TOKENS
    assert seen["chat_stream"] == seen["chat"]
    assert seen["chat_finish"] in ("stop", "length")
    assert seen["chat_stream_usage"] == seen["chat_usage"]
    assert seen["error"] == ["NotFoundError", 404]
    assert seen["refused"] == ["BadRequestError", 400]
