"""`python -m tests.fuzzing.hunt TARGET --findings FOLDER [libFuzzer's options] [corpus]`: fuzzes one target.

If a target raises or is too slow, one input per origin is saved and the hunt continues. Only a lack of memory, a crash
of native code and a timeout end the process.
"""

import argparse
import hashlib
import logging
import shlex
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import atheris
import structlog
import torch  # noqa: F401 (too large to be instrumented, so imported first)
from torch._weights_only_unpickler import Unpickler
from transformers.utils.logging import disable_progress_bar

from tests.fuzzing.campaign import TARGETS

INSTRUMENTED = ["server", "nvium_core", "h11", "uvicorn", "gguf"]
INPUT_SECONDS = 5
"""Allowed CPU time per input."""

OURS = ("nvium_core", "server", "tests/fuzzing")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--findings", type=Path, required=True)
    given, options = parser.parse_known_args()
    with atheris.instrument_imports(include=INSTRUMENTED):
        made = import_module(f"tests.fuzzing.targets.{given.target}")
    Unpickler.load = atheris.instrument_func(Unpickler.load)
    be_quiet()
    given.findings.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "tests.fuzzing.hunt", given.target, "--findings", str(given.findings)]
    # libFuzzer restarts this command when it merges corpora
    atheris.Setup([shlex.join(command), *options], kept(made.target(), given.findings))
    atheris.Fuzz()


def be_quiet() -> None:
    structlog.configure(processors=[], logger_factory=structlog.ReturnLoggerFactory())
    logging.disable()
    disable_progress_bar()
    warnings.simplefilter("ignore")


def kept(check: Callable[[bytes], None], findings: Path) -> Callable[[bytes], None]:
    """Return a check that writes the input and the traceback of a failure to files instead of raising."""
    seen = set[str]()

    def checked(data: bytes) -> None:
        started = time.process_time()
        try:
            check(data)
            if time.process_time() - started > INPUT_SECONDS:
                raise TimeoutError
        except Exception as error:
            if (place := origin(error)) not in seen:
                seen.add(place)
                name = hashlib.sha256(place.encode()).hexdigest()[:12]
                (findings / name).write_bytes(data)
                (findings / f"{name}.txt").write_text("".join(traceback.format_exception(error)))

    return checked


def origin(error: Exception) -> str:
    """Identify an error by its type, the last frame in our code and the last frame."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if any(part in frame.filename for part in OURS)]
    places = [f"{frame.filename}:{frame.lineno}" for frame in (ours[-1:] + frames[-1:])]
    return " ".join([type(error).__name__, *places])


if __name__ == "__main__":
    main()
