"""Measure a server's prefix cache hit rate in growing conversations.

    python -m research.conversations --base-url URL

Conversations run concurrently. Each prompt is the previous prompt, its answer and one more line. So the replica of the
previous turn has nearly the whole prompt in its cache.
"""

import argparse
import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import httpx
from prometheus_client.parser import text_string_to_metric_families

from nvium_core.bench.figures import write_json

PROMPT_TOKENS, CACHED_TOKENS = "nvium_prompt_tokens_total", "nvium_cached_prompt_tokens_total"
OPENING = "Once there was a child who had {number} stones, and every stone knew a story. The first went like this. "
LINE = " And then the child asked for story {turn}, which went quite otherwise. "
TIMEOUT_SECONDS = 300


async def conversation(http: httpx.AsyncClient, number: int, num_turns: int, num_tokens: int) -> list[float]:
    """Run a conversation. Return the seconds of each turn after the first, or raise `httpx.HTTPError`."""
    prompt, seconds = OPENING.format(number=number), []
    for turn in range(num_turns):
        body = {"model": "default", "prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True, "seed": number}
        started = time.perf_counter()
        answer = (await http.post("/v1/completions", json=body)).raise_for_status().json()
        seconds.append(time.perf_counter() - started)
        prompt += answer["choices"][0]["text"] + LINE.format(turn=turn)
    return seconds[1:]


async def prompt_tokens(http: httpx.AsyncClient) -> dict[str, float]:
    """Return the counts of prompt tokens and cached prompt tokens of all replicas, or raise `httpx.HTTPError`."""
    page = (await http.get("/metrics")).raise_for_status().text
    samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
    return {
        name: sum(sample.value for sample in samples if sample.name == name) for name in (PROMPT_TOKENS, CACHED_TOKENS)
    }


async def measured(
    base_url: str, first: int, num_conversations: int, num_turns: int, num_tokens: int
) -> dict[str, float]:
    async with httpx.AsyncClient(base_url=base_url, timeout=TIMEOUT_SECONDS) as http:
        before = await prompt_tokens(http)
        turns = [conversation(http, first + number, num_turns, num_tokens) for number in range(num_conversations)]
        seconds = [each for taken in await asyncio.gather(*turns) for each in taken]
        after = await prompt_tokens(http)
    num_prompt, num_cached = (after[name] - before[name] for name in (PROMPT_TOKENS, CACHED_TOKENS))
    return {
        "hit_share": num_cached / num_prompt,
        "turn_seconds": median(seconds),
        "requests": num_turns * num_conversations,
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="research.conversations", description=__doc__)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000", help="URL of the server, without /v1")
    parser.add_argument("--conversations", type=int, default=12, help="number of concurrent conversations [12]")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=48, help="tokens per answer [48]")
    parser.add_argument(
        "--first", type=int, default=0, help="number of the first conversation, which selects the text [0]"
    )
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    args = parser.parse_args(argv)
    found = asyncio.run(measured(args.base_url, args.first, args.conversations, args.turns, args.tokens))
    print(f"{found['hit_share']:.1%} of prompt tokens were cached; a turn took {found['turn_seconds']:.3f} s")
    if args.json:
        write_json(found, args.json)


if __name__ == "__main__":
    main()
