"""How much of growing prompts a server finds in its cache: `python -m loadtest.conversations`.

Conversations run concurrently, each a chain of completions: a turn's prompt is the last turn's, its answer, and one
more line. So nearly all of it is cached where the last turn ran. Uses HTTP only.
"""

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import httpx
from rich.console import Console

from loadtest.server_view import Totals, totals

PROMPT_TOKENS, CACHED_TOKENS = "nvium_prompt_tokens_total", "nvium_cached_prompt_tokens_total"
OPENING = "Once there was a child who had {number} stones, and every stone knew a story. The first went like this. "
TIMEOUT_SECONDS = 300
LINE = " And then the child asked for story {turn}, which went quite otherwise. "


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(
        prog="loadtest.conversations", allow_abbrev=False, description="What is found in the cache of growing prompts."
    )
    add = options.add_argument
    add("--base-url", default="http://127.0.0.1:8000", help="without /v1")
    add("--conversations", type=int, default=12, metavar="N", help="at once")
    add("--turns", type=int, default=8, metavar="N")
    add("--tokens", type=int, default=48, metavar="N", help="of each answer")
    add("--first", type=int, default=0, metavar="N", help="number of the first; another one is another text")
    add("--json", type=Path, metavar="FILE", help="write the figures here too")
    return options


async def conversation(http: httpx.AsyncClient, number: int, num_turns: int, num_tokens: int) -> list[float]:
    """Seconds of each turn after the first. Raises `httpx.HTTPError`."""
    prompt, seconds = OPENING.format(number=number), []
    for turn in range(num_turns):
        asked = {"model": "default", "prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True, "seed": number}
        started = time.perf_counter()
        answer = (await http.post("/v1/completions", json=asked)).raise_for_status().json()
        seconds.append(time.perf_counter() - started)
        prompt += answer["choices"][0]["text"] + LINE.format(turn=turn)
    return seconds[1:]


async def measured(arguments: argparse.Namespace) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=arguments.base_url, timeout=TIMEOUT_SECONDS) as http:
        before = await totals(http)
        numbers = range(arguments.first, arguments.first + arguments.conversations)
        turns = [conversation(http, number, arguments.turns, arguments.tokens) for number in numbers]
        seconds = [each for told in await asyncio.gather(*turns) for each in told]
        share = hit_share(before, await totals(http))
    return {"hit_share": share, "turn_seconds": median(seconds), "requests": arguments.turns * len(numbers)}


def hit_share(before: Totals, after: Totals) -> float:
    """Share of prompt tokens found in the cache."""
    asked, found = (after[name] - before.get(name, 0) for name in (PROMPT_TOKENS, CACHED_TOKENS))
    return found / asked


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parser().parse_args(argv)
    try:
        found = asyncio.run(measured(arguments))
    except httpx.HTTPError as error:
        raise SystemExit(f"loadtest.conversations: {error}") from error
    Console().print(f"found {found['hit_share']:.1%} of the prompts' tokens, a turn took {found['turn_seconds']:.3f} s")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
