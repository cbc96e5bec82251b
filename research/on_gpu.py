"""Run all GPU measurements, the most important first: `python -m research.on_gpu --minutes 10`.

Each part is a process. After `--minutes` the running part is stopped, and its finished points are kept. Results are
added to one JSON file; a part with complete results in the file is not run again. The output of the parts goes to a log
next to the file. `--tiny` runs the same parts with small models on any machine.
"""

import argparse
import json
import math
import multiprocessing
import os
import runpy
import signal
import socket
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.error import URLError

from nvium_core.bench.figures import write_json

NVIUM = "nvium_core.cli"
CUDA_TESTS = (
    "-m",
    "cuda and not slow",
    *(f"tests/engine/device/graphs/test_{name}.py" for name in ("cuda", "compiled")),
)
SOME_FAILED, NONE_COLLECTED = 1, 5
WITHOUT_PLUGINS = ("-c", os.devnull, "--rootdir", ".", "-p", "no:cacheprovider", "-o", "faulthandler_timeout=90")
STOPPED_AFTER = "stopped_after_seconds"
MAX_PRINTED_CHARACTERS = 3000
"""If a part fails, only the end of its output is printed. The log has the whole output."""

Command = tuple[str, ...]
"""A module and its arguments."""


@dataclass(frozen=True)
class Part:
    """A command. Its results are the file that it writes with `--json`, or else its output.

    `before` is a command to run first. `served` is the command of a server at `port` to run at the same time.
    `seconds` is the time limit of all commands together. `statuses` are the exit codes that count as success.
    """

    name: str
    command: Command
    seconds: int
    writes_json: bool = True
    served: Command = ()
    port: int = 0
    before: Command = ()
    statuses: tuple[int, ...] = (0,)


def parts(device: str, scratch: Path, *, is_tiny: bool) -> Iterator[Part]:
    """Yield all parts. `scratch` is a folder for temporary files."""
    dtype, tokens, repeats = ("bfloat16", "256", "5") if not is_tiny else ("float32", "4", "1")
    shape, counts = ("24x768", (1, 8, 64)) if not is_tiny else ("4x128", (1,))
    where, tiny = ("--device", device, "--dtype", dtype), ("--tiny",) if is_tiny else ()

    def points(name: str, seconds: int) -> Part:
        return Part(name, ("research.gpu.points", name, "--device", device, *tiny), seconds)

    yield points("machine", 30)
    tests = ("pytest", "-v", "-rs", "--tb=short", *WITHOUT_PLUGINS, "-m", "cuda and not slow", *CUDA_TESTS)
    yield Part("tests", tests, 330, writes_json=False, statuses=(0, SOME_FAILED, NONE_COLLECTED))
    yield points("kernels", 150)
    yield points("dense", 120)
    yield points("transformers", 180)
    for count in counts:
        race = ("--sequences", str(count), "--against", "sweep,dense twin", "--seconds", "30" if not is_tiny else "1")
        timed = ("--tokens", tokens, "--repeats", repeats)
        yield Part(f"exits-{count}", (NVIUM, "bench", "peers", "--shape", shape, *where, *timed, *race), 70)
    yield points("prompts", 60)
    folder, port = str(scratch / "dense"), free_port()
    load = ("--concurrency", "1,32,256" if not is_tiny else "1", "--requests", "512" if not is_tiny else "1")
    yield Part(
        "http",
        ("loadtest", "--base-url", f"http://127.0.0.1:{port}", "--max-tokens", tokens, *load),
        200,
        served=(NVIUM, "serve", folder, "--port", str(port), *where, *(("--max-sequences", "2") if is_tiny else ())),
        port=port,
        before=("research.random_folder", folder, *(("--layers", "2") if is_tiny else ())),
    )
    training = ("research.gpu.training_speed", "--device", device)
    training = (*training, *(("--recipe", "tiny", "--steps", "1") if is_tiny else ("--recipe", "paper-24x768")))
    for rows in ("16384", "65536") if not is_tiny else ("1024",):
        yield Part(f"training-eager-{rows}", (*training, "--rows", rows, "--eager"), 60)
    for rows in ("16384", "65536") if not is_tiny else ():
        yield Part(f"training-{rows}", (*training, "--rows", rows), 200)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


class PartError(Exception):
    """A part failed or ran out of time."""


def run(part: Part, scratch: Path, log: Path, end: float) -> Any:
    """Run a part until the time `end`. Return its results, those so far if it was stopped, or None."""
    file = scratch / f"{part.name}.json"
    command = (*part.command, "--json", str(file)) if part.writes_json else part.command
    started = time.monotonic()
    end = min(end, started + part.seconds)
    with log.open("a") as output:
        output.write(f"\n=== {part.name}\n")
        begun = output.tell()
    try:
        if part.before:
            run_command(part.before, log, end)
        with running_server(part, log, end) if part.served else nullcontext():
            run_command(command, log, end, part.statuses)
    except PartError as error:
        print(f"{part.name}: {error}\n{log_since(log, begun)[-MAX_PRINTED_CHARACTERS:]}", flush=True)
        so_far = {STOPPED_AFTER: time.monotonic() - started}
        return so_far | {"points": json.loads(file.read_text("utf-8"))} if file.exists() else None
    print(f"{part.name}: {time.monotonic() - started:.0f} s", flush=True)
    return json.loads(file.read_text("utf-8")) if part.writes_json else {"lines": log_since(log, begun).splitlines()}


def log_since(log: Path, begun: int) -> str:
    """Read the log from byte `begun` to its end."""
    return log.read_bytes()[begun:].decode(errors="replace")


@contextmanager
def running(command: Command, log: Path) -> Iterator[BaseProcess]:
    """Run a command inside the context. At the end, kill it and its children, such as a compiler's workers."""
    process = multiprocessing.Process(target=run_module, args=(command, log))
    process.start()
    try:
        yield process
    finally:
        if process.exitcode is None:
            process.kill()
            with suppress(ProcessLookupError):  # it has not formed its group yet
                os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()


def run_module(command: Command, log: Path) -> None:
    """Run a module in this new process, as the leader of a group of processes."""
    os.setpgid(0, 0)
    with log.open("ab") as output:
        os.dup2(output.fileno(), sys.stdout.fileno())
        os.dup2(output.fileno(), sys.stderr.fileno())
    sys.argv = [*command]
    runpy.run_module(command[0], run_name="__main__", alter_sys=True)


def run_command(command: Command, log: Path, end: float, statuses: tuple[int, ...] = (0,)) -> None:
    """Run a command. Raise `PartError` if it fails, or still runs at time `end`."""
    with running(command, log) as process:
        process.join(max(0.0, end - time.monotonic()))
        if process.exitcode is None:
            raise PartError(f"{' '.join(command)}: stopped, because its time is over")
        if process.exitcode not in statuses:
            raise PartError(f"{' '.join(command)}: ended with status {process.exitcode}")


@contextmanager
def running_server(part: Part, log: Path, end: float) -> Iterator[None]:
    """Run a part's server inside the context. Raise `PartError` if it is not ready at time `end`."""
    with running(part.served, log) as process:
        while not is_ready(part.port):
            if process.exitcode is not None or time.monotonic() > end:
                raise PartError(f"{' '.join(part.served)}: not ready")
            time.sleep(0.5)
        yield


def is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5):
            return True
    except (URLError, OSError):
        return False


def main(arguments: list[str] | None = None) -> int:
    """Run the parts. Return 0 if all parts succeed, else 1."""
    parser = argparse.ArgumentParser(prog="research.on_gpu", description=__doc__)
    parser.add_argument("--file", type=Path, default=Path("benchmarks/gpu.json"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", nargs="*", help="names of parts to run")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after this time")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args(arguments)
    end = time.monotonic() + 60 * args.minutes
    is_forked = args.device == "cpu"  # CUDA does not work in a forked process
    multiprocessing.set_start_method("fork" if is_forked else "spawn")
    if is_forked:
        runpy.run_module("research.gpu.points")  # imports for all processes what takes seconds
    with TemporaryDirectory() as scratch:
        open_parts = [
            part
            for part in parts(args.device, Path(scratch), is_tiny=args.tiny)
            if STOPPED_AFTER in known(args.file).get(part.name, [STOPPED_AFTER])
            and (not args.only or part.name in args.only)
        ]
        succeed = [run_and_record(part, args.file, Path(scratch), end) for part in open_parts]
    return int(not all(succeed))


def run_and_record(part: Part, file: Path, scratch: Path, end: float) -> bool:
    """Run a part and add its results to the file. Return False if it is skipped or fails."""
    if time.monotonic() > end:
        print(f"{part.name}: skipped, because the time is over", flush=True)
        return False
    file.parent.mkdir(parents=True, exist_ok=True)
    found = run(part, scratch, file.with_suffix(".log"), end)
    if found is None:
        return False
    partial = file.with_suffix(".partial")
    write_json({**known(file), part.name: found}, partial)
    partial.replace(file)
    return STOPPED_AFTER not in found


def known(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text("utf-8")) if file.exists() else {}
    return found


if __name__ == "__main__":
    sys.exit(main())
