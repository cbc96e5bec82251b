"""Agents' loops: a tool is called, its result is sent back, and an answer ends it.

The model is a random one that is led along a script, as no model that fits here would choose the tool by itself; what
the request allows, the format of calls, and everything on the way to the agent and back is the server's own.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.byte_model import NAME, load_byte_model
from tests.conformance import programs
from tests.conformance.programs import CLIENTS, NODE_MODULES, installed, pinned, run
from tests.server.live_server import live_server
from tests.server.scripted_answers import answering

pytestmark = pytest.mark.conformance

AGENTS = ("openai_agents", "pydantic_ai", "langchain", "llm", "inspect")
PACKAGES = ("openai-agents", "pydantic-ai-slim", "langchain-openai", "llm", "inspect_ai")
FRAMEWORKS = ("haystack-ai", "llama-index-llms-openai-like", "smolagents")
AGENTS_PYTHON = CLIENTS / "agents" / "bin" / "python"
CALL = '{"name": "weather", "arguments": {"city":"Bern"}}'
FORM = '{"name": "Weather", "arguments": {"city":"Bern"}}'
OBJECT = '{"city":"Bern"}'
ANSWER = "It rains."
LAST_CALL = '{"name": "final_answer", "arguments": {"answer":"It rains."}}'
MODES = {"TOOLS": FORM, "JSON": OBJECT, "JSON_SCHEMA": OBJECT, "MD_JSON": f"```json\n{OBJECT}\n```"}
MODES |= {"RESPONSES_TOOLS": FORM, "PARALLEL_TOOLS": f"{FORM}\n{FORM}"}
"""Those of instructor, with an answer in each."""

NUM_ASKED_BY_SDK = 3
"""Chats whole and streamed, and a response."""


def seen_by(program: str | Path, client: str, *script: str) -> Any:
    """Let a client talk to a model that follows the script. Return the last line that the client prints."""
    path, environment = Path(__file__).with_name(client), {"NODE_PATH": str(NODE_MODULES)}
    with live_server(load_byte_model(context=8192)) as server, answering(server.app, *script):
        output = run([program, path, f"{server.url}/v1", NAME], seconds=240, environment=environment)
    return json.loads(output.splitlines()[-1])


def test_agents_call_a_tool_and_answer_with_its_result_of_a_model_that_follows_a_script(record):
    seen = seen_by(installed(AGENTS_PYTHON), "agents_client.py", *[CALL, ANSWER] * len(AGENTS))
    for package in PACKAGES:
        record(package, pinned(package, programs.AGENTS), requests=2)
    assert seen == {"answers": dict.fromkeys(AGENTS, ANSWER), "cities": ["Bern"] * len(AGENTS)}


def test_frameworks_call_a_tool_and_answer_with_its_result_of_a_model_that_follows_a_script(record):
    script = (CALL, ANSWER, CALL, ANSWER, CALL, LAST_CALL)
    seen = seen_by(installed(CLIENTS / "bin" / "python"), "frameworks_client.py", *script)
    for package in FRAMEWORKS:
        record(package, pinned(package), requests=2)
    assert seen == {"answers": [ANSWER] * len(FRAMEWORKS), "cities": ["Bern"] * len(FRAMEWORKS)}


def test_instructor_makes_objects_in_six_modes_of_a_model_that_follows_a_script(record):
    seen = seen_by(installed(CLIENTS / "bin" / "python"), "instructor_client.py", *MODES.values())
    record("instructor", pinned("instructor"), requests=len(MODES))
    assert seen == {mode: ["Bern"] * (1 + (mode == "PARALLEL_TOOLS")) for mode in MODES}


def test_guidance_gets_an_object_and_a_text_of_a_model_that_follows_a_script(record):
    seen = seen_by(installed(AGENTS_PYTHON), "guidance_client.py", '{"city":"Bern"}', ANSWER)
    record("guidance", pinned("guidance", programs.AGENTS), requests=2)
    assert seen == {"city": "Bern", "weather": ANSWER}


def test_the_ai_sdk_calls_a_tool_and_answers_with_its_result_of_a_model_that_follows_a_script(record):
    node = shutil.which("node") or pytest.skip("node is not installed")
    assert installed(NODE_MODULES)
    seen = seen_by(node, "ai_sdk_client.cjs", *[CALL, ANSWER] * NUM_ASKED_BY_SDK)
    record("AI SDK", seen["version"], requests=2 * NUM_ASKED_BY_SDK)
    assert seen["answers"] == [ANSWER] * NUM_ASKED_BY_SDK
    assert seen["cities"] == ["Bern"] * NUM_ASKED_BY_SDK
