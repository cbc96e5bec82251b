"""The `nvium` command. User errors are one line on stderr and exit code 2."""

import ctypes
import logging
import os
import sys
from contextlib import suppress
from importlib.metadata import version as distribution_version
from typing import Annotated

import typer

from nvium_core.commands import measuring, running, training
from nvium_core.errors import NviumError, rephrase

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of mallopt

UsageError: type[Exception] = typer.BadParameter.__bases__[0]
"""The base class of click's usage errors, taken from typer, because some versions of typer bundle their own click."""

app = typer.Typer(rich_markup_mode=None)

for command in (
    running.serve,
    running.generate,
    running.chat,
    training.train,
    training.plot,
    training.recipes,
    training.convert,
    training.retrofit,
    measuring.evaluate,
    measuring.bench,
):
    app.command()(command)


def main() -> None:
    open_missing_streams()
    logging.basicConfig(format="%(message)s")  # the engine's log on stderr; `nvium serve` configures its own
    logging.getLogger("nvium_core").setLevel(logging.INFO)
    tune_libc("".join(sys.argv[1:2]))
    try:
        status = typer.main.get_command(app)(sys.argv[1:] or ["--help"], prog_name="nvium", standalone_mode=False)
    except UsageError as error:
        fail(rephrase(error.format_message()))  # type: ignore[attr-defined]
    except (NviumError, OSError) as error:
        fail(str(error))
    except MemoryError:
        fail("not enough memory; try a smaller model or quantization, --cache-memory or --max-sequences")
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    sys.exit(status if isinstance(status, int) else 0)


def open_missing_streams() -> None:
    """Point closed standard streams to /dev/null.

    Otherwise the next file or socket could get descriptor 2, and libraries would write their logs to it.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free descriptor, which is `descriptor`


def tune_libc(command: str) -> None:
    """Set up threads and memory for training and evaluation. Call before importing torch.

    Idle OpenMP threads sleep after 1,000 iterations, unless GOMP_SPINCOUNT is set. By default they spin for
    milliseconds, which on a busy machine makes several threads slower than one thread. In training glibc keeps freed
    memory, because clearing returned pages takes an eighth of a small model's training time.
    """
    libc = ctypes.CDLL(None)
    if command in ("train", "retrofit", "evaluate") and hasattr(libc, "setenv"):
        libc.setenv(b"GOMP_SPINCOUNT", b"1000", 0)
    if command in ("train", "retrofit") and hasattr(libc, "mallopt"):
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def fail(message: str) -> None:
    with suppress(OSError):
        print("nvium: " + " ".join(message.split()), file=sys.stderr)
    sys.exit(2)


def show_version(wanted: bool) -> None:
    if wanted:
        print(f"nvium {distribution_version('nvium')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Serve, train and evaluate N-viums: mixture-of-exits transformers."""


if __name__ == "__main__":
    main()
