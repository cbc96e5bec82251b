"""Agents of the terminal: each runs a command and ends its turn, of a model that follows a script."""

import json
from dataclasses import dataclass

import pytest

from tests.byte_model import NAME, load_byte_model
from tests.conformance.programs import CLIENTS, NODE_MODULES, installed, run
from tests.server.live_server import live_server
from tests.server.scripted_answers import answering

pytestmark = pytest.mark.conformance

CODEX = """\
model = "{model}"
model_provider = "nvium"
check_for_update_on_startup = false
[model_providers.nvium]
name = "nvium"
base_url = "{url}/v1"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
"""
CONTINUE = """\
name: nvium
version: 1.0.0
schema: v1
models: [{{name: nvium, provider: openai, model: {model}, apiBase: "{url}/v1", apiKey: none, capabilities: [tool_use]}}]
"""
OPENCODE = """\
{{"model": "nvium/{model}", "small_model": "nvium/{model}", "permission": {{"bash": "allow"}}, "autoupdate": false,
  "provider": {{"nvium": {{"npm": "@ai-sdk/openai-compatible", "options": {{"baseURL": "{url}/v1"}},
    "models": {{"{model}": {{"limit": {{"context": 60000, "output": 256}}}}}}}}}}}}
"""
COMMAND = "echo seen > told.txt"
ANSWER = "It is done."
TITLE = "A title, which is asked for first."


@dataclass(frozen=True)
class Agent:
    """`configuration` is written into the home folder as `file`."""

    package: str
    program: str
    arguments: tuple[str, ...]
    file: str
    configuration: str
    tool: str
    argument: str = "command"
    answers_before: tuple[str, ...] = ()


EXEC = ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
AUTO = ("--config", "{home}/config.yaml", "--auto", "-p")
AGENTS = (
    Agent("@openai/codex", "codex", EXEC, "config.toml", CODEX, "exec_command", "cmd"),
    Agent("@continuedev/cli", "cn", AUTO, "config.yaml", CONTINUE, "Bash"),
    Agent("opencode-ai", "opencode", ("run",), "opencode.json", OPENCODE, "bash", answers_before=(TITLE,)),
)


@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.program)
def test_an_agent_runs_a_command_and_answers(agent, record, tmp_path):
    program = installed(NODE_MODULES / ".bin" / agent.program)
    package = json.loads((NODE_MODULES / agent.package / "package.json").read_text(encoding="utf-8"))
    home, work = tmp_path / "home", tmp_path / "work"
    for folder in (home, work):
        folder.mkdir()
    call = f'{{"name": "{agent.tool}", "arguments": {{"{agent.argument}":"{COMMAND}"}}}}'
    answers = [*agent.answers_before, call, ANSWER]
    environment = {"HOME": str(home), "PWD": str(work), "CODEX_HOME": str(home)}
    environment |= {"OPENCODE_CONFIG": str(home / agent.file)}
    with live_server(load_byte_model(context=65536)) as server, answering(server.app, *answers):
        (home / agent.file).write_text(agent.configuration.format(model=NAME, url=server.url), encoding="utf-8")
        arguments = [argument.format(home=home) for argument in agent.arguments]
        output = run([program, *arguments, "Say it."], seconds=480, cwd=work, environment=environment)
    assert output.rstrip().endswith(ANSWER)
    assert (work / "told.txt").read_text(encoding="utf-8") == "seen\n"
    record(agent.package, package["version"], requests=len(answers))


def test_aider_edits_a_file(record, tmp_path):
    aider = installed(CLIENTS / "aider" / "bin" / "aider")
    (told := tmp_path / "told.txt").touch()
    quietly = ("--no-git", "--yes-always", "--no-show-model-warnings", "--no-check-update", "--analytics-disable")
    editing = ("--edit-format", "whole", "--map-tokens", "0", "--message", "Say it.")
    with live_server(load_byte_model(context=65536)) as server, answering(server.app, "told.txt\n```\nseen\n```\n"):
        model = ("--model", f"openai/{NAME}", "--openai-api-base", f"{server.url}/v1", "--openai-api-key", "none")
        run([aider, *model, *quietly, *editing, told], seconds=240, cwd=tmp_path, environment={"HOME": str(tmp_path)})
    assert told.read_text(encoding="utf-8") == "seen\n"
    record("aider", run([aider, "--version"], seconds=120).split()[-1], requests=1)
