"""All that is to be measured on a GPU, in order: `python -m nvium_core.bench.on_gpu`.

Each part is a process of its own of less than ten minutes, and leaves one file in the folder; what has its file is not
run again. A part that needs a package which is not installed is left out, and the package named. `--tiny` tries the
list anywhere, in a folder of its own.
"""

import argparse
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from urllib.error import URLError

PYTHON = sys.executable
NVIUM = (PYTHON, "-m", "nvium_core.cli")
MAX_SECONDS = 590
SHAPES, DENSE_1B = ("24x768", "36x768", "48x768"), "22x2048"
COUNTS, DENSE_COUNTS, STREAMS = (1, 8, 32, 64, 128, 256), (1, 32, 256), "32,256"
PORT = 8765
OF_ALL, OF_TESTS, OF_SERVER = ("platformdirs",), ("pytest", "hypothesis"), ("fastapi", "structlog", "uvicorn")
"""Packages that a machine with PyTorch may lack, and that cannot be done without."""


@dataclass(frozen=True)
class Part:
    """A command. `writes_json`: it takes --json; otherwise what it prints is kept. `is_served`: beside a server."""

    name: str
    command: tuple[str, ...]
    writes_json: bool = True
    is_served: bool = False
    needs: tuple[str, ...] = ()

    @property
    def missing(self) -> list[str]:
        """Packages that it needs and that are not installed."""
        return [package for package in (*OF_ALL, *self.needs) if find_spec(package) is None]


def parts(device: str, *, is_tiny: bool) -> Iterator[Part]:
    """In the order of their worth."""
    dtype, tokens, repeats, seconds = ("bfloat16", "256", "5", "300") if not is_tiny else ("float32", "4", "1", "1")
    shapes, dense = (SHAPES, DENSE_1B) if not is_tiny else (("4x128",), "2x128")
    counts, dense_counts = (COUNTS, DENSE_COUNTS) if not is_tiny else ((1, 2), (1,))
    where = ("--device", device, "--dtype", dtype)
    timed = ("--tokens", tokens, "--repeats", repeats)

    def peers(shape: str, count: int, against: str, *more: str) -> tuple[str, ...]:
        race = ("--sequences", str(count), "--against", against, "--seconds", seconds)
        return (*NVIUM, "bench", "peers", "--shape", shape, *where, *timed, *race, *more)

    without_plugins = ("-c", os.devnull, "--rootdir", ".", "-p", "no:cacheprovider")
    tests = ("-q", "-rs", *without_plugins, "-m", "cuda", "tests/engine/device/graphs/test_cuda.py")
    yield Part("tests", (PYTHON, "-m", "pytest", *tests), writes_json=False, needs=OF_TESTS)
    batches = ("--sequences", "1,4,16,64" if not is_tiny else "1", "--requests", "64" if not is_tiny else "2")
    bench = (*NVIUM, "bench")
    yield Part("determinism", (*bench, "determinism", "--shape", shapes[0], *where, *batches, *timed))
    for shape in shapes:
        yield Part(f"gain-{shape}", peers(shape, 1, "dense twin,generate"))
    for count in counts:
        yield Part(f"sequences-{count}", peers(shapes[0], count, "sweep,dense twin"))
    profiled = ("--sequences", "1,64" if not is_tiny else "1", "--tokens", tokens)
    yield Part("profile", (*bench, "profile", "--shape", shapes[0], *where, *profiled))
    for count in dense_counts:
        yield Part(f"dense-{dense}-{count}", peers(dense, count, "generate", "--routing", "1"))
    load = ("--concurrency", STREAMS if not is_tiny else "1", "--requests", "512" if not is_tiny else "1")
    url = ("--base-url", f"http://127.0.0.1:{PORT}", "--max-tokens", tokens)
    yield Part("http", (PYTHON, "-m", "loadtest", *url, *load), is_served=True, needs=OF_SERVER)
    if not is_tiny:
        yield Part("training", (*NVIUM, "train", "paper-24x768", "--device", device, "--dry-run"), writes_json=False)


def run(part: Part, file: Path, device: str) -> bool:
    """Whether the part came to its end; its file is there then."""
    scratch = file.with_suffix(".part")
    command = (*part.command, "--json", str(scratch)) if part.writes_json else part.command
    started = time.monotonic()
    try:
        with server(device, MAX_SECONDS) if part.is_served else nothing():
            done = subprocess.run(command, capture_output=True, check=False, text=True, timeout=MAX_SECONDS)  # noqa: S603 (our own)
    except (subprocess.TimeoutExpired, TimeoutError) as error:
        say(f"{part.name}: {error}")
        return False
    seconds = time.monotonic() - started
    if done.returncode:
        say(f"{part.name}: failed after {seconds:.0f} s\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        return False
    if not part.writes_json:
        lines = done.stdout.splitlines()
        scratch.write_text(json.dumps({"command": command[1:], "lines": lines}, indent=1) + "\n", encoding="utf-8")
    scratch.replace(file)
    say(f"{part.name}: {seconds:.0f} s")
    return True


@contextmanager
def nothing() -> Iterator[None]:
    yield


@contextmanager
def server(device: str, seconds: float) -> Iterator[None]:
    """The embedded model, served until the end of the block."""
    options = ("--port", str(PORT), "--device", device, "--max-sequences", "256")
    process = subprocess.Popen((*NVIUM, "serve", *options), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # noqa: S603
    try:
        wait_until_ready(time.monotonic() + seconds)
        yield
    finally:
        process.terminate()
        process.wait(60)


def wait_until_ready(end: float) -> None:
    while time.monotonic() < end:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/readyz", timeout=5):
                return
        except (URLError, OSError):
            time.sleep(0.5)
    raise TimeoutError("the server is not ready")


def say(*words: str) -> None:
    print(*words, flush=True)  # noqa: T201 (a program that is run by hand)


def main(arguments: list[str] | None = None) -> int:
    """0 if nothing is left to be done."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("benchmarks"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", nargs="*", help="names of parts")
    parser.add_argument("--list", action="store_true", help="say what would be run")
    parser.add_argument("--tiny", action="store_true")
    asked = parser.parse_args(arguments)
    asked.folder.mkdir(parents=True, exist_ok=True)
    left = 0
    for part in parts(asked.device, is_tiny=asked.tiny):
        file = asked.folder / f"gpu-{part.name}.json"
        if file.exists() or (asked.only and part.name not in asked.only):
            continue
        if asked.list:
            say(part.name, *part.command[1:])
        elif part.missing:
            say(f"{part.name}: left out, as {', '.join(part.missing)} cannot be imported")
            left += 1
            continue
        left += asked.list or not run(part, file, asked.device)
    return min(left, 1)


if __name__ == "__main__":
    sys.exit(main())
