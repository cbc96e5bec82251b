"""Agents' loops: a tool is called, its result is sent back, and an answer ends it.

The model is a random one that is led along a script, as no model that fits here would choose the tool by itself; what
the request allows, the format of calls, and everything on the way to the agent and back is the server's own.
"""

import json
from pathlib import Path

import pytest

from tests.byte_model import NAME, load_byte_model
from tests.conformance import programs
from tests.conformance.conftest import Record
from tests.conformance.programs import CLIENTS, installed, pinned, run
from tests.server.live_server import live_server
from tests.server.scripted_answers import answering

pytestmark = pytest.mark.conformance

AGENTS = ("openai_agents", "pydantic_ai", "langchain")
CALL = '{"name": "weather", "arguments": {"city":"Bern"}}'
ANSWER = "It rains."


def test_three_agents_call_a_tool_and_answer_with_its_result_of_a_model_that_follows_a_script(record: Record) -> None:
    python = installed(CLIENTS / "agents" / "bin" / "python")
    script = [CALL, ANSWER] * len(AGENTS)
    with live_server(load_byte_model()) as server, answering(server.app, *script):
        client = Path(__file__).with_name("agents_client.py")
        finished = run([python, client, f"{server.url}/v1", NAME], seconds=120)
    assert finished.exit_code == 0
    for package in ("openai-agents", "pydantic-ai-slim", "langchain-openai"):
        record(package, pinned(package, programs.AGENTS), requests=2)
    seen = json.loads(finished.output.splitlines()[-1])
    assert seen == {"answers": dict.fromkeys(AGENTS, ANSWER), "cities": ["Bern"] * len(AGENTS)}
