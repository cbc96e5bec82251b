import asyncio
import json
import signal
import sys
from functools import partial

import pytest

from loadtest.__main__ import main, measure
from loadtest.workload import Workload, workloads
from tests.loadtest.fake_server import STORY, FakeServer, client_of, serving, until


async def run_against(server: FakeServer, *arguments: str) -> int:
    async with serving(server) as base_url:
        return await asyncio.to_thread(main, ["--base-url", base_url, *arguments])


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["--base-url", "http://127.0.0.1:8000/v1"], "--base-url"),
        (["--api-key", "ключ"], "--api-key"),
        (["--requests", "0"], "--requests"),
        (["--rate", "2,0"], "--rate"),
        (["--temperature", "nan"], "--temperature"),
        (["--timeout", "0"], "--timeout"),
        (["--max-tokens", "few"], "--max-tokens"),
        (["--rate", "1,1"], "--rate"),
        (["--rate", "1", "--concurrency", "2"], "--rate"),
        (["--concurrency", "64"], "--concurrency"),
        (["--prompts", "no such file"], "no such file"),
        (["--json", "no such folder/report.json"], "no such folder"),
        (["--unknown"], "--unknown"),
    ],
)
def test_an_invalid_argument_is_one_line_on_stderr_and_exit_code_2(arguments, name, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    assert name in output.err


async def test_a_run_prints_tables_and_writes_its_numbers(tmp_path, capsys):
    path = tmp_path / "report.json"
    code = await run_against(FakeServer(events=STORY), "--requests", "5", "--concurrency", "2", "--json", str(path))
    assert code == 0
    assert "time to first token" in capsys.readouterr().out
    written = json.loads(path.read_text())
    assert written["options"]["requests"] == 5
    [point] = written["points"]
    assert (point["report"]["num_tokens"], point["report"]["exits"]) == (15, {"1": 10, "3": 5})


async def test_a_sweep_has_a_point_for_each_load(tmp_path, capsys):
    path = tmp_path / "report.json"
    arguments = ["--rate", "200,500", "--requests", "3", "--max-tokens", "2", "--json", str(path)]
    server = FakeServer(events=STORY)
    assert await run_against(server, *arguments) == 0
    written = json.loads(path.read_text())
    assert [(point["concurrency"], point["rate"]) for point in written["points"]] == [(None, 200.0), (None, 500.0)]
    assert all(point["report"]["num_succeeded"] == 3 for point in written["points"])
    assert "rate 500/s" in capsys.readouterr().out
    assert {body["max_tokens"] for body in server.bodies} == {2}


async def test_the_key_is_sent_as_a_bearer_token_and_not_written(tmp_path, capsys):
    server, path = FakeServer(events=STORY), tmp_path / "report.json"
    await run_against(server, "--requests", "4", "--api-key", "secret", "--json", str(path))
    assert "Bearer secret" in server.headers[0]
    assert "secret" not in capsys.readouterr().out + path.read_text()


async def test_every_load_is_measured_after_a_warm_up():
    server = FakeServer(events=STORY)
    sweep = workloads(Workload(num_requests=4), [{"concurrency": 1}, {"rate": 500.0}], 2)
    watched, done = [], []

    def watch(name, num_requests):
        watched.append((name, num_requests))
        return done.append

    async with client_of(server) as client:
        points = [await measure(client, load, 2, watch) for load in sweep]
    assert [(report["num_succeeded"], report["num_tokens"]) for _, report in points] == [(4, 12), (4, 12)]
    assert sorted(body["seed"] for body in server.bodies) == list(range(12))
    names, numbers = zip(*watched, strict=True)
    assert names == ("concurrency 1, warm-up", "concurrency 1", "rate 500/s, warm-up", "rate 500/s")
    assert numbers == (2, 4, 2, 4)
    assert len(done) == 12


async def test_an_interrupted_run_keeps_the_results_of_finished_loads(tmp_path):
    server, path = FakeServer(events=STORY, num_answers=5), tmp_path / "report.json"
    async with serving(server) as base_url:
        sweep = ("--warm-up", "0", "--requests", "3", "--concurrency", "1,2", "--json", str(path))
        command = (sys.executable, "-m", "loadtest", "--base-url", base_url, *sweep)
        heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # which a background job ignores
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*command, stderr=pipe, preexec_fn=heed)
        await until(lambda: len(server.bodies) == 6)
        process.send_signal(signal.SIGINT)
        _, errors = await process.communicate()
    assert process.returncode == 130
    assert b"Traceback" not in errors
    assert [point["report"]["num_succeeded"] for point in json.loads(path.read_text())["points"]] == [3]
