"""Agents' loops: a tool is called, its result is sent back, and an answer ends it.

The model is a random one that is led along a script, as no model that fits here would choose the tool by itself; what
the request allows, the format of calls, and everything on the way to the agent and back is the server's own.
"""

import json
import shutil
from pathlib import Path

import pytest

from tests.byte_model import NAME, load_byte_model
from tests.conformance import programs
from tests.conformance.conftest import Record
from tests.conformance.programs import CLIENTS, NODE_MODULES, installed, pinned, run
from tests.server.live_server import live_server
from tests.server.scripted_answers import answering

pytestmark = pytest.mark.conformance

AGENTS = ("openai_agents", "pydantic_ai", "langchain", "llm", "inspect")
PACKAGES = ("openai-agents", "pydantic-ai-slim", "langchain-openai", "llm", "inspect_ai")
CALL = '{"name": "weather", "arguments": {"city":"Bern"}}'
FORM = '{"name": "Weather", "arguments": {"city":"Bern"}}'
ANSWER = "It rains."
NUM_ASKED_BY_SDK = 3
"""Chats whole and streamed, and a response."""


def test_agents_call_a_tool_and_answer_with_its_result_of_a_model_that_follows_a_script(record: Record) -> None:
    python = installed(CLIENTS / "agents" / "bin" / "python")
    script = [CALL, ANSWER] * len(AGENTS)
    with live_server(load_byte_model()) as server, answering(server.app, *script):
        client = Path(__file__).with_name("agents_client.py")
        finished = run([python, client, f"{server.url}/v1", NAME], seconds=240)
    assert finished.exit_code == 0
    for package in PACKAGES:
        record(package, pinned(package, programs.AGENTS), requests=2)
    seen = json.loads(finished.output.splitlines()[-1])
    assert seen == {"answers": dict.fromkeys(AGENTS, ANSWER), "cities": ["Bern"] * len(AGENTS)}


def test_instructor_makes_an_object_of_a_forced_call_of_a_model_that_follows_a_script(record: Record) -> None:
    python, client = installed(CLIENTS / "bin" / "python"), Path(__file__).with_name("instructor_client.py")
    with live_server(load_byte_model()) as server, answering(server.app, FORM):
        finished = run([python, client, f"{server.url}/v1", NAME], seconds=120)
    assert finished.exit_code == 0
    record("instructor", pinned("instructor"), requests=1)
    assert json.loads(finished.output.splitlines()[-1]) == {"city": "Bern"}


def test_guidance_gets_an_object_and_a_text_of_a_model_that_follows_a_script(record: Record) -> None:
    python, client = installed(CLIENTS / "agents" / "bin" / "python"), Path(__file__).with_name("guidance_client.py")
    with live_server(load_byte_model()) as server, answering(server.app, '{"city":"Bern"}', ANSWER):
        finished = run([python, client, f"{server.url}/v1", NAME], seconds=120)
    assert finished.exit_code == 0
    record("guidance", pinned("guidance", programs.AGENTS), requests=2)
    assert json.loads(finished.output.splitlines()[-1]) == {"city": "Bern", "weather": ANSWER}


def test_the_ai_sdk_calls_a_tool_and_answers_with_its_result_of_a_model_that_follows_a_script(record: Record) -> None:
    node = shutil.which("node") or pytest.skip("node is not installed")
    environment = {"NODE_PATH": str(installed(NODE_MODULES))}
    client = Path(__file__).with_name("ai_sdk_client.cjs")
    with live_server(load_byte_model()) as server, answering(server.app, *[CALL, ANSWER] * NUM_ASKED_BY_SDK):
        finished = run([node, client, f"{server.url}/v1", NAME], seconds=120, environment=environment)
    assert finished.exit_code == 0
    seen = json.loads(finished.output.splitlines()[-1])
    record("AI SDK", seen["version"], requests=2 * NUM_ASKED_BY_SDK)
    assert seen["answers"] == [ANSWER] * NUM_ASKED_BY_SDK
    assert seen["cities"] == ["Bern"] * NUM_ASKED_BY_SDK
