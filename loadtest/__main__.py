"""Load test of a server: `python -m loadtest --base-url http://127.0.0.1:8000 --concurrency 1,2,4,8`.

Exit codes: 0 if all requests succeeded, 1 if some failed, 2 for invalid arguments. After SIGINT or SIGTERM, the test
writes the results so far and exits with 130.
"""

import argparse
import asyncio
import json
import signal
import sys
import threading
from collections.abc import Sequence

import httpx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from loadtest import options
from loadtest.client import LoadClient
from loadtest.sweep import OnDone, Point, measure
from loadtest.tables import tables
from loadtest.workload import Workload, WorkloadError


def http_client(arguments: argparse.Namespace) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=arguments.base_url,
        headers={"Authorization": f"Bearer {arguments.api_key}"} if arguments.api_key else {},
        timeout=arguments.timeout,
        limits=httpx.Limits(max_connections=None),
    )


def stop_on_signals(client: LoadClient) -> None:
    """On the main thread, stop the test on SIGINT and SIGTERM. Other threads cannot handle signals."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, client.stop)


async def run(arguments: argparse.Namespace, sweep: Sequence[Workload]) -> tuple[list[Point], bool]:
    """Run the workloads. Return their results, and whether all workloads have run."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    async with http_client(arguments) as http:
        client = LoadClient(http, model=arguments.model)
        stop_on_signals(client)
        with Progress(*columns, console=Console(stderr=True)) as progress:

            def watch(name: str, num_requests: int) -> OnDone:
                task = progress.add_task(name, total=num_requests)
                return lambda _: progress.advance(task)

            points = await measure(client, sweep, arguments.warm_up, watch)
    return points, not client.stopped


def write(arguments: argparse.Namespace, points: Sequence[Point], is_complete: bool) -> None:
    to_stdout = arguments.json == options.STDOUT
    if points:
        Console(stderr=to_stdout).print(*tables(points))
    if arguments.json:
        used = {name: value for name, value in vars(arguments).items() if name not in ("api_key", "json")}
        record = {"options": used, "complete": is_complete, "points": [point.to_json() for point in points]}
        text = json.dumps(record, indent=2, default=str) + "\n"
        sys.stdout.write(text) if to_stdout else arguments.json.write_text(text, encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    parser = options.parser()
    arguments = parser.parse_args(argv)
    try:
        sweep = options.sweep(arguments)
        if arguments.json and arguments.json != options.STDOUT:
            arguments.json.touch()  # if the file cannot be written, fail now, before the measurement
    except (WorkloadError, OSError) as error:
        parser.error(str(error))
    points, is_complete = asyncio.run(run(arguments, sweep))
    write(arguments, points, is_complete)
    if not is_complete:
        return 130
    return 1 if any(point.report.num_failed for point in points) else 0


if __name__ == "__main__":
    sys.exit(main())
