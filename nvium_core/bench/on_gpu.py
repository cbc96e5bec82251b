"""All that is to be measured on a GPU, in order: `python -m nvium_core.bench.on_gpu`.

Each part is a process of its own, of so many seconds that all end in half an hour, but for transformers' `generate`,
which compiles for minutes. What it finds is added to one JSON file at once; a part that is in it is not run again. What
it says is added to a log beside the file. A part that needs a package which is not installed is left out, and the
package named. `--seconds` is for a machine that ends a command after so many: what may take longer is not begun.
`--tiny` tries the list anywhere, with a file of its own.
"""

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.error import URLError

PYTHON = sys.executable
NVIUM = (PYTHON, "-m", "nvium_core.cli")
READY_SECONDS, END_SECONDS = 120, 20
"""For a server to be ready, and to end."""

CUDA_TESTS, SOME_FAILED = "tests/engine/device/graphs/test_cuda.py", 1
"""Which of them failed is found too."""

SHAPES, DENSE_1B = ("24x768", "36x768", "48x768"), "22x2048"
COUNTS, DENSE_COUNTS, STREAMS = (8, 32, 64, 128, 256), (1, 32, 256), "32,256"
PORT = 8765
SHOWN = 3000
"""Characters of a part that failed; all it said is in the log."""

OF_ALL, OF_TESTS = ("platformdirs", "annotated_types", "typer", "rich"), ("pytest", "hypothesis")
OF_SERVER = ("fastapi", "httpx", "llguidance", "opentelemetry", "pydantic_settings", "structlog", "uvicorn")
"""Packages that a machine with PyTorch may lack, and that cannot be done without."""


@dataclass(frozen=True)
class Part:
    """A command; what it prints is kept unless it takes --json. `before` is a command that ends before it, `served` a
    server's, which runs beside it. `statuses` are those that it may end with."""

    name: str
    command: tuple[str, ...]
    seconds: int
    """After which it is ended; what comes before it counts."""
    writes_json: bool = True
    served: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    statuses: tuple[int, ...] = (0,)

    @property
    def missing(self) -> list[str]:
        """Packages that it needs and that are not installed."""
        return [package for package in (*OF_ALL, *self.needs) if find_spec(package) is None]


def parts(device: str, scratch: Path, *, is_tiny: bool) -> Iterator[Part]:
    """In the order of their worth. `scratch` is a folder."""
    dtype, tokens, repeats = ("bfloat16", "256", "5") if not is_tiny else ("float32", "4", "1")
    shapes, dense = (SHAPES, DENSE_1B) if not is_tiny else (("4x128",), "2x128")
    counts, dense_counts = (COUNTS, DENSE_COUNTS) if not is_tiny else ((1, 2), (1,))
    where = ("--device", device, "--dtype", dtype)
    timed = ("--tokens", tokens, "--repeats", repeats)

    def peers(shape: str, count: int, against: str, seconds: int, *more: str) -> tuple[str, ...]:
        race = ("--sequences", str(count), "--against", against, "--seconds", str(seconds if not is_tiny else 1))
        return (*NVIUM, "bench", "peers", "--shape", shape, *where, *timed, *race, *more)

    without_plugins = ("-c", os.devnull, "--rootdir", ".", "-p", "no:cacheprovider", "-o", "faulthandler_timeout=90")
    tests = ("-v", "-rs", "--tb=short", "--durations=5", *without_plugins, "-m", "cuda", CUDA_TESTS)
    command = (PYTHON, "-m", "pytest", *tests)
    yield Part("tests", command, 270, writes_json=False, needs=OF_TESTS, statuses=(0, SOME_FAILED))
    bench = (*NVIUM, "bench")
    for shape in shapes:
        yield Part(f"gain-{shape}", peers(shape, 1, "sweep,dense twin", 40), 80)
    for count in counts:
        yield Part(f"sequences-{count}", peers(shapes[0], count, "sweep,dense twin", 30), 70)
    profiled = ("--sequences", "1,64" if not is_tiny else "1", "--tokens", tokens)
    yield Part("profile", (*bench, "profile", "--shape", shapes[0], *where, *profiled), 60)
    for count in dense_counts:
        yield Part(f"dense-{dense}-{count}", peers(dense, count, "synchronous", 20, "--routing", "1"), 60)
    steps, recipe = ("10", "paper-24x768") if not is_tiny else ("1", "tiny")
    training = (PYTHON, "-m", "nvium_core.bench.training", "--recipe", recipe, "--device", device, "--steps", steps)
    load = ("--concurrency", STREAMS if not is_tiny else "1", "--requests", "512" if not is_tiny else "1")
    url = ("--base-url", f"http://127.0.0.1:{PORT}", "--max-tokens", tokens)
    folder = str(scratch / "dense")
    serve = (*NVIUM, "serve", folder, "--port", str(PORT), *where, "--max-sequences", "256" if not is_tiny else "2")
    yield Part(
        "http",
        (PYTHON, "-m", "loadtest", *url, *load),
        200,
        served=serve,
        before=(PYTHON, "-m", "nvium_core.bench.random_folder", folder, *(("--layers", "2") if is_tiny else ())),
        needs=OF_SERVER,
    )
    eager = ("--eager", *(("--rows", "1024") if is_tiny else ()))
    yield Part("training-eager", (*training, *eager), 50)
    yield Part("training", training if not is_tiny else (*training, *eager), 200)
    batches = ("--sequences", "1,16" if not is_tiny else "1", "--requests", "16" if not is_tiny else "2")
    brief = ("--tokens", "32" if not is_tiny else "4", "--repeats", "2")
    yield Part("determinism", (*bench, "determinism", "--shape", shapes[0], *where, *batches, *brief), 100)
    for shape in shapes:
        yield Part(f"generate-{shape}", peers(shape, 1, "generate", 30), 180)
    yield Part(f"generate-{dense}", peers(dense, 1, "generate", 30, "--routing", "1"), 180)


def run(part: Part, scratch: Path, log: Path) -> Any:
    """What the part found, or None. What it says is added to the log."""
    file = scratch / f"{part.name}.json"
    command = (*part.command, "--json", str(file)) if part.writes_json else part.command
    started = time.monotonic()
    end = started + part.seconds
    with log.open("a") as told:
        told.write(f"\n=== {part.name}\n")
        begun = told.tell()
    try:
        if part.before:
            finish(part.before, log, end)
        with served(part.served, log) if part.served else nullcontext():
            finish(command, log, end, part.statuses)
    except subprocess.SubprocessError as error:
        say(f"{part.name}: {error}\n{said(log, begun)[-SHOWN:]}")
        return None
    say(f"{part.name}: {time.monotonic() - started:.0f} s")
    return json.loads(file.read_text("utf-8")) if part.writes_json else {"lines": said(log, begun).splitlines()}


def said(log: Path, begun: int) -> str:
    """From this byte on."""
    return log.read_bytes()[begun:].decode(errors="replace")


def finish(command: tuple[str, ...], log: Path, end: float, statuses: tuple[int, ...] = (0,)) -> None:
    """Run the command. Raises `SubprocessError` if it fails, or goes on after `end`: then it is ended, with all that it
    has started, such as a compiler's workers."""
    with log.open("ab") as told:
        process = subprocess.Popen(command, stdout=told, stderr=told, process_group=0)  # noqa: S603 (our own)
    try:
        status = process.wait(max(0.0, end - time.monotonic()))
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    if status not in statuses:
        raise subprocess.CalledProcessError(status, command)


@contextmanager
def served(command: tuple[str, ...], log: Path) -> Iterator[None]:
    """Until the end of the block. Raises `SubprocessError` if the server does not become ready."""
    with log.open("ab") as told:
        process = subprocess.Popen(command, stdout=told, stderr=told)  # noqa: S603 (our own)
    try:
        wait_until_ready(process, time.monotonic() + READY_SECONDS)
        yield
    finally:
        process.terminate()
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_until_ready(process: subprocess.Popen[bytes], end: float) -> None:
    while time.monotonic() < end:
        if process.poll() is not None:
            raise subprocess.CalledProcessError(process.returncode, process.args)
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/readyz", timeout=5):
                return
        except (URLError, OSError):
            time.sleep(0.5)
    raise subprocess.TimeoutExpired(process.args, READY_SECONDS)


def say(*words: str) -> None:
    print(*words, flush=True)  # noqa: T201 (a program that is run by hand)


def main(arguments: list[str] | None = None) -> int:
    """0 if nothing is left to be done."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--file", type=Path, default=Path("benchmarks/gpu.json"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", nargs="*", help="names of parts")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin nothing that may take longer")
    parser.add_argument("--list", action="store_true", help="say what would be run")
    parser.add_argument("--tiny", action="store_true")
    asked = parser.parse_args(arguments)
    end = time.monotonic() + asked.seconds
    with TemporaryDirectory() as scratch:
        return min(1, sum(not is_done(part, asked, Path(scratch), end) for part in wanted(asked, Path(scratch))))


def wanted(asked: argparse.Namespace, scratch: Path) -> Iterator[Part]:
    """Parts that are not in the file."""
    for part in parts(asked.device, scratch, is_tiny=asked.tiny):
        if part.name not in known(asked.file) and (not asked.only or part.name in asked.only):
            yield part


def is_done(part: Part, asked: argparse.Namespace, scratch: Path, end: float) -> bool:
    """Now, and what it found is in the file."""
    if asked.list:
        say(part.name, f"({part.seconds} s)", *part.command[1:])
        return False
    if part.missing:
        say(f"{part.name}: left out, as {', '.join(part.missing)} cannot be imported")
        return False
    if part.seconds > end - time.monotonic():
        say(f"{part.name}: left for another time, as it may take {part.seconds} s")
        return False
    asked.file.parent.mkdir(parents=True, exist_ok=True)
    found = run(part, scratch, asked.file.with_suffix(".log"))
    if found is None:
        return False
    partial = asked.file.with_suffix(".partial")
    partial.write_text(json.dumps({**known(asked.file), part.name: found}, indent=1) + "\n", encoding="utf-8")
    partial.replace(asked.file)
    return True


def known(file: Path) -> dict[str, Any]:
    """What each part found."""
    found: dict[str, Any] = json.loads(file.read_text("utf-8")) if file.exists() else {}
    return found


if __name__ == "__main__":
    sys.exit(main())
