"""Load test of a server: `python -m loadtest --base-url http://127.0.0.1:8000 --concurrency 1,2,4,8`.

Exit codes: 0 if all requests succeeded, 1 if some failed, 2 for invalid arguments, 130 after SIGINT.
"""

import asyncio
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from typer import Option

from loadtest.client import LoadClient, OnDone
from loadtest.report import Point, report, table
from loadtest.workload import DEFAULT_PROMPTS, Workload, WorkloadError, read_prompts, workloads

Watch = Callable[[str, int], OnDone]
"""Takes a workload's name and number of requests. Returns the function to call with each result."""

LEAST = 0.001  # the least time and the least rate

UsageError: type[Exception] = typer.BadParameter.__bases__[0]
"""The base class of click's usage errors, taken from typer, because some versions of typer bundle their own click."""


def checked_url(text: str) -> str:
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL as error:
        raise typer.BadParameter(str(error)) from error
    if url.scheme not in ("http", "https") or not url.host:
        raise typer.BadParameter(f"must be an http or https URL, got {text}")
    if url.path.rstrip("/").endswith("/v1"):
        raise typer.BadParameter("must not end with /v1")
    return text


def header_value(text: str | None) -> str | None:
    if text is not None and not (text.isascii() and text.isprintable() and text.strip()):
        raise typer.BadParameter("must be printable ASCII")
    return text


def finite(number: float) -> float:
    if not number < math.inf:
        raise typer.BadParameter(f"must be a finite number, got {number}")
    return number


def several(least: float) -> Callable[[str], list[float]]:
    """Return a parser for distinct numbers, separated by commas, of the type of `least`."""

    def parse(text: str) -> list[float]:
        with suppress(ValueError):
            found = [type(least)(each) for each in text.split(",")]
            if len(set(found)) == len(found) and all(least <= number < math.inf for number in found):
                return found
        raise typer.BadParameter(f"must be distinct numbers of at least {least}, got {text}")

    return parse


def load_test(
    context: typer.Context,
    base_url: Annotated[
        str, Option(metavar="URL", callback=checked_url, help="the server, without /v1")
    ] = "http://127.0.0.1:8000",
    model: Annotated[str, Option(help="model name in the requests")] = "default",
    api_key: Annotated[str | None, Option(metavar="KEY", callback=header_value, help="sent as a bearer token")] = None,
    timeout: Annotated[
        float, Option(metavar="SECONDS", min=LEAST, callback=finite, help="time without data until a request fails")
    ] = 300.0,
    concurrency: Annotated[
        Any, Option(metavar="N,N…", parser=several(1), help="closed loop: concurrent users [4]")
    ] = None,
    rate: Annotated[
        Any, Option(metavar="R,R…", parser=several(LEAST), help="open loop: requests per second, Poisson")
    ] = None,
    requests: Annotated[int, Option(metavar="N", min=1, help="requests per load")] = 32,
    warm_up: Annotated[int, Option(metavar="N", min=0, help="warm-up requests before each load")] = 4,
    max_tokens: Annotated[int, Option(metavar="N", min=1, help="tokens per answer")] = 64,
    ignore_eos: Annotated[
        bool, Option("--ignore-eos", help="generate up to --max-tokens (an nvium and vLLM extension)")
    ] = False,
    temperature: Annotated[float, Option(metavar="T", min=0, callback=finite)] = 1.0,
    seed: Annotated[int, Option(metavar="N", min=0, help="for arrivals; request i samples with N + i")] = 0,
    prompts: Annotated[Path | None, Option(metavar="FILE", help="one prompt per line")] = None,
    json: Annotated[Path | None, Option(metavar="FILE", help="write the results to this file")] = None,
) -> int:
    """Measure a running OpenAI-compatible server over HTTP."""
    if rate and concurrency:
        raise typer.BadParameter("not allowed with --concurrency", param_hint="'--rate'")
    if max(concurrency or [0]) > requests:
        raise WorkloadError(f"--concurrency {max(concurrency)} requires at least as many --requests")
    base = Workload(
        prompts=read_prompts(prompts) if prompts else DEFAULT_PROMPTS,
        num_requests=requests,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        ignore_eos=ignore_eos,
    )
    levels = [{"rate": each} for each in rate or ()]
    levels = levels or [{"concurrency": each} for each in concurrency or [min(4, requests)]]
    write(context.params, [])  # if the file cannot be written, fail now, before the measurement
    try:
        points = asyncio.run(run(context.params, workloads(base, levels, warm_up)))
    except KeyboardInterrupt:
        return 130
    Console().print(table(points))
    return 1 if any(measured["num_failed"] for _, measured in points) else 0


async def run(options: Mapping[str, Any], sweep: Sequence[Workload]) -> list[Point]:
    """Run the workloads. Write the JSON file after each of them."""
    points: list[Point] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    headers = {"Authorization": f"Bearer {options['api_key']}"} if options["api_key"] else {}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=options["base_url"], headers=headers, timeout=options["timeout"], limits=limits
    ) as http:
        client = LoadClient(http, model=options["model"])
        with Progress(*columns, console=Console(stderr=True)) as progress:

            def watch(name: str, num_requests: int) -> OnDone:
                task = progress.add_task(name, total=num_requests)
                return lambda _: progress.advance(task)

            for load in sweep:
                points.append(await measure(client, load, options["warm_up"], watch))
                write(options, points)
    return points


async def measure(client: LoadClient, load: Workload, warm_up: int, watch: Watch) -> Point:
    """Measure a workload, after `warm_up` requests that do not count."""
    if warm_up:
        warming = replace(load, num_requests=warm_up, first=load.first - warm_up)
        await client.run(warming, watch(f"{load.name}, warm-up", warm_up))
    return load, report(await client.run(load, watch(load.name, load.num_requests)))


def write(options: Mapping[str, Any], points: Sequence[Point]) -> None:
    """Write the JSON file, if any. Times are in seconds."""
    if options["json"]:
        used = {name: value for name, value in sorted(options.items()) if name not in ("api_key", "json")}
        results = [
            {"concurrency": None if load.rate else load.concurrency, "rate": load.rate, "report": measured}
            for load, measured in points
        ]
        text = json.dumps({"options": used, "points": results}, indent=2, default=str) + "\n"
        options["json"].write_text(text, encoding="utf-8")


app = typer.Typer(rich_markup_mode=None, add_completion=False)
app.command(context_settings={"help_option_names": ["-h", "--help"]})(load_test)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else list(argv)
    try:
        status: int = typer.main.get_command(app)(arguments, prog_name="loadtest", standalone_mode=False)
    except UsageError as error:
        message = error.format_message()  # type: ignore[attr-defined]
    except (WorkloadError, OSError) as error:
        message = str(error)
    else:
        return status
    typer.echo("loadtest: " + " ".join(message.split()), err=True)
    sys.exit(2)


if __name__ == "__main__":
    sys.exit(main())
