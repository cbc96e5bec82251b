"""OpenAI's client for Node: another language, and another reader of event streams."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.programs import NODE_MODULES, installed, run

SCRIPT = Path(__file__).with_name("node_client.cjs")


@pytest.mark.conformance
def test_the_node_client_reads_models_whole_answers_streams_and_errors(server, record):
    node = shutil.which("node") or pytest.skip("node is not installed")
    environment = {"NODE_PATH": str(installed(NODE_MODULES))}
    seen = json.loads(run([node, SCRIPT, server.api, server.model], seconds=60, environment=environment))
    record("openai for Node", seen["version"], requests=9)
    assert seen["models"] == [server.model]
    assert seen["model"] == server.model
    assert joined(seen["completionChunks"]) == text_and_usage(seen["completion"])
    assert joined(seen["chatChunks"]) == text_and_usage(seen["chat"])
    [whole], [together] = seen["chat"]["choices"], seen["together"]["choices"]
    assert together["message"]["nvium"]["token_ids"] == whole["nvium"]["token_ids"]
    assert (seen["refused"]["name"], seen["refused"]["status"]) == ("BadRequestError", 400)
    assert seen["refused"]["param"] == "temperature"
    assert (seen["unknown"]["name"], seen["unknown"]["code"]) == ("NotFoundError", "model_not_found")
    assert seen["unknown"]["requestID"]


def text_and_usage(answer: Any) -> tuple[str, list[int]]:
    [choice] = answer["choices"]
    return choice["text"] if "text" in choice else choice["message"]["content"], counts(answer["usage"])


def joined(chunks: list[Any]) -> tuple[str, list[int]]:
    """A stream's text, and the usage that its last chunk tells."""
    *chunks, last = chunks
    assert last["choices"] == []
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
    assert choices[-1]["finish_reason"] in ("stop", "length")
    parts = [choice["text"] if "text" in choice else choice["delta"].get("content") or "" for choice in choices]
    return "".join(parts), counts(last["usage"])


def counts(usage: Any) -> list[int]:
    """What does not depend on who asked before, as the tokens found in the cache do."""
    return [usage[f"{kind}_tokens"] for kind in ("prompt", "completion", "total")]
