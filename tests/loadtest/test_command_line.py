import asyncio
import json
from pathlib import Path

import pytest

from loadtest.__main__ import main
from tests.loadtest.fake_server import STORY, FakeServer, serving


async def run_against(server: FakeServer, *arguments: str) -> int:
    async with serving(server) as base_url:
        return await asyncio.to_thread(main, ["--base-url", base_url, *arguments])


@pytest.mark.parametrize(
    "arguments",
    [
        ["--base-url", "nowhere"],
        ["--requests", "0"],
        ["--requests", "many"],
        ["--rate", "-1"],
        ["--rate", "1", "--concurrency", "2"],
        ["--prompts", "no such file"],
        ["--json", "no such folder/report.json"],
        ["--unknown"],
    ],
)
def test_bad_arguments_are_one_line_on_stderr_and_exit_code_2(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1


async def test_a_run_prints_tables_and_writes_its_numbers(tmp_path: Path, capsys):
    path = tmp_path / "report.json"
    code = await run_against(FakeServer(events=STORY), "--requests", "5", "--concurrency", "2", "--json", str(path))
    assert code == 0
    assert "time to first token" in capsys.readouterr().out
    written = json.loads(path.read_text())
    assert written["workload"]["num_requests"] == 5
    assert written["report"]["num_tokens"] == 15
    assert [request["exits"] for request in written["requests"]] == [[1, 3, 1]] * 5


async def test_a_run_with_failures_exits_with_1():
    assert await run_against(FakeServer(events=[], status="503 Service Unavailable"), "--requests", "2") == 1


async def test_the_key_is_sent_as_a_bearer_token():
    server = FakeServer(events=STORY)
    await run_against(server, "--requests", "1", "--api-key", "secret")
    assert "Bearer secret" in server.headers[0]
