import asyncio
import json
from pathlib import Path

import httpx
import pytest

from loadtest.__main__ import main
from loadtest.server_view import ServerView, totals
from tests.loadtest.fake_server import STORY, FakeServer, serving

PAGE = """# TYPE nvium_time_to_first_token_seconds histogram
nvium_time_to_first_token_seconds_bucket{{le="+Inf"}} {count}
nvium_time_to_first_token_seconds_count {count}
nvium_time_to_first_token_seconds_sum {sum}
"""


async def test_means_are_of_what_was_observed_during_the_run(tmp_path: Path, capsys):
    path = tmp_path / "report.json"
    metrics = [PAGE.format(count=10, sum=100), PAGE.format(count=14, sum=101)]
    async with serving(FakeServer(events=STORY, gap=0.01, metrics=metrics)) as base_url:
        arguments = ["--base-url", base_url, "--requests", "4", "--warm-up", "0", "--json", str(path)]
        assert await asyncio.to_thread(main, arguments) == 0
    means = json.loads(path.read_text())["points"][0]["means"]
    assert means["time_to_first_token"]["server"] == 0.25
    assert means["time_to_first_token"]["client"] > 0.01
    assert means["inter_token_latency"]["server"] is None
    assert "250.0" in capsys.readouterr().out


async def test_a_server_without_metrics_has_no_view():
    async with serving(FakeServer(events=STORY)) as base_url, httpx.AsyncClient(base_url=base_url) as http:
        assert await totals(http) == {}
    assert ServerView({}, {}).mean("time_to_first_token") is None


@pytest.mark.parametrize("page", ["<html>", "a{ 1"])
async def test_a_page_of_something_else_is_no_view(page):
    server = FakeServer(events=STORY, metrics=[page])
    async with serving(server) as base_url, httpx.AsyncClient(base_url=base_url) as http:
        assert await totals(http) == {}


def test_a_server_that_was_started_anew_has_no_means():
    before = {"nvium_time_to_first_token_seconds_sum": 9.0, "nvium_time_to_first_token_seconds_count": 90.0}
    assert ServerView(before, {}).mean("time_to_first_token") is None


async def test_a_server_that_is_away_has_no_view():
    async with httpx.AsyncClient(base_url="http://127.0.0.1:1") as http:
        assert await totals(http) == {}
