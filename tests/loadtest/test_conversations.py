import asyncio
import json
from pathlib import Path

import httpx
import pytest

from loadtest.conversations import main
from loadtest.server_view import totals
from tests.loadtest.fake_server import FakeServer, serving

PAGE = """# TYPE nvium_prompt_tokens counter
nvium_prompt_tokens_total{{replica="a"}} {asked}
nvium_prompt_tokens_total{{replica="b"}} 100
# TYPE nvium_cached_prompt_tokens counter
nvium_cached_prompt_tokens_total{{replica="a"}} {found}
nvium_cached_prompt_tokens_total{{replica="b"}} 0
"""
ANSWER = json.dumps({"choices": [{"text": " a fox"}]})


async def test_each_turn_asks_for_all_that_was_said_and_the_share_found_is_told(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    server = FakeServer(events=[ANSWER], metrics=[PAGE.format(asked=0, found=0), PAGE.format(asked=40, found=30)])
    async with serving(server) as base_url:
        arguments = ["--base-url", base_url, "--conversations", "2", "--turns", "3", "--json", str(file)]
        await asyncio.to_thread(main, arguments)
    told = json.loads(file.read_text())
    assert (told["hit_share"], told["requests"]) == (0.75, 6)
    assert told["turn_seconds"] > 0
    for seed in (0, 1):
        first, second, third = [body["prompt"] for body in server.bodies if body["seed"] == seed]
        assert second.startswith(f"{first} a fox")
        assert third.startswith(f"{second} a fox")


async def test_a_server_that_refuses_is_not_measured() -> None:
    async with serving(FakeServer(events=[], status="503 Service Unavailable")) as base_url:
        with pytest.raises(SystemExit, match="503"):
            await asyncio.to_thread(main, ["--base-url", base_url])


async def test_replicas_are_counted_together_and_other_labels_not_at_all() -> None:
    page = PAGE.format(asked=40, found=30) + 'nvium_other_total{exit="1",replica="a"} 1\n'
    async with serving(FakeServer(events=[], metrics=[page])) as base_url, httpx.AsyncClient(base_url=base_url) as http:
        assert await totals(http) == {"nvium_prompt_tokens_total": 140, "nvium_cached_prompt_tokens_total": 30}
