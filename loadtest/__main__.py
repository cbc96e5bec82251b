"""Load test of a server: `python -m loadtest --base-url http://127.0.0.1:8000 --concurrency 1,2,4,8`.

Exit codes: 0 if all requests succeeded, 1 if some failed, 2 for invalid arguments, 130 after SIGINT.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence

import httpx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from loadtest import options
from loadtest.client import LoadClient
from loadtest.sweep import OnDone, Point, measure, table
from loadtest.workload import Workload, WorkloadError


async def run(arguments: argparse.Namespace, sweep: Sequence[Workload]) -> list[Point]:
    """Run the workloads. Write the JSON file after each of them."""
    points: list[Point] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    headers = {"Authorization": f"Bearer {arguments.api_key}"} if arguments.api_key else {}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=arguments.base_url, headers=headers, timeout=arguments.timeout, limits=limits
    ) as http:
        client = LoadClient(http, model=arguments.model)
        with Progress(*columns, console=Console(stderr=True)) as progress:

            def watch(name: str, num_requests: int) -> OnDone:
                task = progress.add_task(name, total=num_requests)
                return lambda _: progress.advance(task)

            for load in sweep:
                points.append(await measure(client, load, arguments.warm_up, watch))
                write(arguments, points)
    return points


def write(arguments: argparse.Namespace, points: Sequence[Point]) -> None:
    if arguments.json:
        used = {name: value for name, value in vars(arguments).items() if name not in ("api_key", "json")}
        record = {"options": used, "points": [point.to_json() for point in points]}
        arguments.json.write_text(json.dumps(record, indent=2, default=str) + "\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    parser = options.parser()
    arguments = parser.parse_args(argv)
    try:
        sweep = options.sweep(arguments)
        write(arguments, [])  # if the file cannot be written, fail now, before the measurement
    except (WorkloadError, OSError) as error:
        parser.error(str(error))
    try:
        points = asyncio.run(run(arguments, sweep))
    except KeyboardInterrupt:
        return 130
    Console().print(table(points))
    return 1 if any(point.report.num_failed for point in points) else 0


if __name__ == "__main__":
    sys.exit(main())
