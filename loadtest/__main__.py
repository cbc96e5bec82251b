"""The load test's command line: `python -m loadtest --base-url http://127.0.0.1:8000 --concurrency 4`.

Exit codes: 0 all requests succeeded, 1 some did not, 2 the arguments make no sense, 130 interrupted.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import httpx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from loadtest.client import LoadClient, Outcome
from loadtest.report import Report
from loadtest.server_view import ServerView, totals
from loadtest.workload import DEFAULT_PROMPTS, Workload, WorkloadError, read_prompts


class OneLineParser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"loadtest: {message}\n")


def parser() -> argparse.ArgumentParser:
    options = OneLineParser(
        prog="loadtest", allow_abbrev=False, description="Measure a running OpenAI-compatible server over HTTP."
    )
    add = options.add_argument
    add("--base-url", type=httpx.URL, default=httpx.URL("http://127.0.0.1:8000"), help="without /v1")
    add("--model", default="default", help="the model to ask for")
    add("--api-key", help="sent as a bearer token")
    add("--requests", type=int, default=32, metavar="N", help="how many in all")
    add("--max-tokens", type=int, default=64, metavar="N", help="tokens per request, at most")
    add("--temperature", type=float, default=1.0)
    add("--seed", type=int, default=0, help="request i uses seed + i; also draws the arrivals")
    add("--ignore-eos", action="store_true", help="go on to --max-tokens; not every server knows it")
    add("--prompts", type=Path, metavar="FILE", help=".jsonl (Spec-Bench's, or with `prompt`) or text, one per line")
    add("--timeout", type=float, default=300.0, metavar="SECONDS", help="without a sign of life")
    add("--json", type=Path, metavar="FILE", help="write the report and every request's numbers here")
    loop = options.add_mutually_exclusive_group()
    loop.add_argument("--concurrency", type=int, default=4, metavar="N", help="closed loop: users at a time")
    loop.add_argument("--rate", type=float, metavar="R", help="open loop: Poisson arrivals per second")
    return options


def workload(arguments: argparse.Namespace) -> Workload:
    return Workload(
        prompts=read_prompts(arguments.prompts) if arguments.prompts else DEFAULT_PROMPTS,
        num_requests=arguments.requests,
        max_tokens=arguments.max_tokens,
        concurrency=arguments.concurrency,
        rate=arguments.rate,
        temperature=arguments.temperature,
        seed=arguments.seed,
        ignore_eos=arguments.ignore_eos,
    )


def http_client(arguments: argparse.Namespace) -> httpx.AsyncClient:
    if arguments.base_url.scheme not in ("http", "https") or not arguments.base_url.host:
        raise WorkloadError(f"--base-url must be an http or https address, got {arguments.base_url}")
    return httpx.AsyncClient(
        base_url=arguments.base_url,
        headers={"Authorization": f"Bearer {arguments.api_key}"} if arguments.api_key else {},
        timeout=arguments.timeout,
        limits=httpx.Limits(max_connections=None),
    )


async def measure(http: httpx.AsyncClient, model: str, load: Workload) -> tuple[list[Outcome], ServerView]:
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    async with http:
        with Progress(*columns, console=Console(stderr=True)) as progress:
            task = progress.add_task("requests", total=load.num_requests)
            before = await totals(http)
            outcomes = await LoadClient(http, model=model).run(load, lambda _: progress.advance(task))
            return outcomes, ServerView(before, await totals(http))


def record(load: Workload, report: Report, view: ServerView, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    settings = asdict(load) | {"prompts": len(load.prompts)}
    requests = [
        {
            "due": outcome.due,
            "time_to_first_token": outcome.time_to_first_token,
            "latency": outcome.latency,
            "num_prompt_tokens": outcome.num_prompt_tokens,
            "num_tokens": outcome.num_tokens,
            "exits": outcome.exits,
            "error": outcome.error,
        }
        for outcome in sorted(outcomes, key=lambda outcome: outcome.due)
    ]
    return {"workload": settings, "report": report.to_json(), "means": view.to_json(report), "requests": requests}


def main(argv: Sequence[str] | None = None) -> int:
    options = parser()
    arguments = options.parse_args(argv)
    try:
        load = workload(arguments)
        http = http_client(arguments)
        if arguments.json:
            arguments.json.touch()
    except (WorkloadError, OSError) as error:
        options.error(str(error))
    try:
        outcomes, view = asyncio.run(measure(http, arguments.model, load))
    except KeyboardInterrupt:
        return 130
    report = Report.of(outcomes)
    Console().print(*report.tables(), view.table(report))
    if arguments.json:
        arguments.json.write_text(json.dumps(record(load, report, view, outcomes), indent=2) + "\n", encoding="utf-8")
    return 1 if report.num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
