"""The `nvium` command.

A user's mistake ends as one line on stderr and exit code 2.
"""

import ctypes
import os
import sys
from contextlib import suppress
from importlib.metadata import version as distribution_version
from typing import Annotated

import typer

from nvium_core.commands import evaluation, generating, measuring, retrofitting, serving, training
from nvium_core.errors import NviumError, plain

USER_ERROR = 2

THROUGHPUT_COMMANDS = ("train", "evaluate", "retrofit")
SPIN = b"1000"
"""Iterations that OpenMP's threads spin before they sleep."""

UsageError: type[Exception] = typer.BadParameter.__bases__[0]
"""The base of click's usage errors, taken from typer, as some versions bundle their own click."""

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="N-vium, served and trained.")

COMMANDS = (
    serving.serve,
    generating.generate,
    generating.chat,
    training.train,
    training.recipes,
    training.convert,
    retrofitting.retrofit,
    evaluation.evaluate,
    measuring.bench,
)
for command in COMMANDS:
    app.command()(command)


def main() -> None:
    """Entry point: runs a command; errors of the user become one line and exit code 2."""
    take_closed_streams()
    if sys.argv[1:2] and sys.argv[1] in THROUGHPUT_COMMANDS:
        spin_briefly()
    try:
        arguments = serving.with_names_joined(sys.argv[1:])
        status = typer.main.get_command(app)(arguments, prog_name="nvium", standalone_mode=False)
    except UsageError as error:
        fail(plain(error.format_message()))  # type: ignore[attr-defined]
    except (NviumError, OSError) as error:
        fail(str(error))
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    sys.exit(status if isinstance(status, int) else 0)


def take_closed_streams() -> None:
    """Open missing standard streams on /dev/null. Otherwise the next file or connection gets descriptor 2, and
    libraries write their messages into a checkpoint or to a client."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free descriptor


def spin_briefly() -> None:
    """Let OpenMP's threads sleep soon, unless the user has set how long they spin. Call before importing torch. The
    default, milliseconds, makes several threads slower than one on a busy machine."""
    setenv = getattr(ctypes.CDLL(None), "setenv", None)
    if setenv:
        setenv(b"GOMP_SPINCOUNT", SPIN, 0)


def fail(message: str) -> None:
    """One line on stderr, if it takes one; exit code 2."""
    with suppress(OSError):
        print("nvium: " + " ".join(message.split()), file=sys.stderr)
    sys.exit(USER_ERROR)


def show_version(wanted: bool) -> None:
    if wanted:
        print(f"nvium {distribution_version('nvium')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print it.")] = False,
) -> None:
    """Serve, try, train and evaluate mixture-of-exits transformers."""


if __name__ == "__main__":
    main()
