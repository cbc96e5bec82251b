"""The `nvium` command.

A user's mistake ends as one line on stderr and exit code 2.
"""

import os
import sys
from contextlib import suppress
from importlib.metadata import version as distribution_version
from typing import Annotated

import typer

from nvium_core.commands import evaluation, generating, measuring, planning, retrofitting, serving, training
from nvium_core.errors import NviumError

USER_ERROR = 2

UsageError: type[Exception] = typer.BadParameter.__bases__[0]
"""The root of click's usage errors; some versions of typer bundle their own click, so it is reached from here."""

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
    evaluation.evaluate_chat,
    evaluation.evaluate_baseline,
    evaluation.compare,
    evaluation.iso,
    measuring.bench,
    planning.plan,
)
for command in COMMANDS:
    app.command()(command)


def main() -> None:
    """Entry point: runs a command; errors of the user become one line and exit code 2."""
    take_closed_streams()
    try:
        arguments = serving.with_names_joined(sys.argv[1:])
        status = typer.main.get_command(app)(arguments, prog_name="nvium", standalone_mode=False)
    except UsageError as error:
        fail(error.format_message())  # type: ignore[attr-defined]
    except (NviumError, OSError) as error:
        fail(str(error))
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    sys.exit(status if isinstance(status, int) else 0)


def take_closed_streams() -> None:
    """Standard streams that the process began without would be its next files or connections, and what libraries say
    there (on descriptor 2) would be written into a checkpoint or to a client."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest that is free


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
