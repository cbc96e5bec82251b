"""Smoke tests of libraries that many programs reach OpenAI's API through."""

import json
from pathlib import Path

import pytest

from tests.conformance.programs import CLIENTS, installed, pinned, run

MAX_TOKENS = 12

pytestmark = pytest.mark.conformance

NOT_FOUND = ["OpenAIModelNotFoundError", 404, "model_not_found"]
REFUSED = ["OpenAIInvalidRequestError", 400, "out_of_range", "temperature"]


@pytest.mark.parametrize(
    ("package", "client", "error", "refused"),
    [
        ("langchain-openai", "langchain_client.py", NOT_FOUND, REFUSED),
        ("litellm", "litellm_client.py", ["NotFoundError", 404], ["BadRequestError", 400]),
    ],
)
def test_a_library_completes_chats_streams_and_maps_errors(package, client, error, refused, server, record):
    python = installed(CLIENTS / "bin" / "python")
    output = run([python, Path(__file__).with_name(client), server.api, server.model], seconds=120)
    seen = json.loads(output.splitlines()[-1])
    record(package, pinned(package), requests=6)
    assert seen["completion"]
    assert seen["completion_stream"] == seen["completion"]
    assert seen["chat_stream"] == seen["chat"]
    assert seen["chat_finish"] in ("stop", "length")
    assert all(0 < usage[1] <= MAX_TOKENS for usage in (seen["chat_usage"], seen.get("completion_usage", [0, 1])))
    assert seen["chat_stream_usage"] == seen["chat_usage"]
    assert seen["error"][: len(error)] == error
    assert seen["refused"] == refused
