"""Prints generated text to stdout, each token in the colour of its exit. Prints statistics to stderr."""

import signal
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.text import Text

from nvium_core.engine.validation import ContextLengthExceeded
from nvium_core.llm import LLM, Message, Piece
from nvium_core.model.config import NviumConfig

EXIT_COLOURS = ["bright_cyan", "bright_green", "bright_yellow", "bright_magenta", "bright_blue", "bright_red", "white"]

Stream = Generator[Piece, None, None]

HELP = "Ctrl-D quits, Ctrl-C stops the answer, /reset starts a new conversation."


@dataclass(frozen=True)
class Terminal:
    """Consoles for generated text (stdout) and for everything else (stderr)."""

    text: Console = field(default_factory=lambda: Console(highlight=False))
    remarks: Console = field(default_factory=lambda: Console(stderr=True, highlight=False))


def continue_text(terminal: Terminal, llm: LLM, prompt: str, sampling: dict[str, Any]) -> None:
    pieces = llm.stream(prompt, **sampling)
    terminal.text.print(Text(prompt, "dim"), end="", soft_wrap=True)
    show(terminal, llm, pieces)


def converse(
    terminal: Terminal, llm: LLM, read: Callable[[], str], system: str | None, sampling: dict[str, Any]
) -> None:
    """Answer messages until `read` raises `EOFError`. If the context is full, drop the oldest turns."""
    beginning: list[Message] = [{"role": "system", "content": system}] if system else []
    turns: list[Message] = []
    terminal.remarks.print(HELP, style="dim")
    while True:
        try:
            message = read().strip()
        except EOFError:
            return
        if message == "/reset":
            turns.clear()
        elif message.startswith("/"):
            terminal.remarks.print(f"unknown command {message.split()[0]}. {HELP}", style="dim", markup=False)
        elif message:
            turns.append({"role": "user", "content": message})
            with interruption() as is_interrupted:
                answer = show(terminal, llm, stream_answer(terminal, llm, beginning, turns, sampling), is_interrupted)
            turns.append({"role": "assistant", "content": answer})


def stream_answer(
    terminal: Terminal, llm: LLM, beginning: Sequence[Message], turns: list[Message], sampling: dict[str, Any]
) -> Stream:
    """Stream the answer. Drop the oldest questions and answers until the conversation fits the context."""
    while True:
        try:
            return llm.stream([*beginning, *turns], **sampling)
        except ContextLengthExceeded:
            if len(turns) == 1:
                turns.clear()
                raise
            del turns[:2]
            terminal.remarks.print("(context full: dropped the oldest question and answer)", style="dim")


@contextmanager
def interruption() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether Ctrl-C was pressed. Within this context, Ctrl-C has no other effect."""
    pressed: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _frame: pressed.append(number))
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, before)


def show(terminal: Terminal, llm: LLM, pieces: Stream, is_stopped: Callable[[], bool] = lambda: False) -> str:
    """Print a stream until it ends or `is_stopped` returns true, then print statistics. Return the stream's text."""
    exits: list[int] = []
    texts: list[str] = []
    started = time.monotonic()
    with closing(pieces):
        for piece in pieces:
            exits += piece.exits
            texts.append(piece.text)
            terminal.text.print(Text(piece.text, exit_colour(piece.exits[-1])), end="", soft_wrap=True)
            if is_stopped():
                break
    terminal.text.print()
    if exits:
        summarise(terminal.remarks, exits, llm.loaded.model.config, time.monotonic() - started)
    return "".join(texts)


def exit_colour(exit_number: int) -> str:
    return EXIT_COLOURS[(exit_number - 1) % len(EXIT_COLOURS)]


def summarise(console: Console, exits: Sequence[int], config: NviumConfig, seconds: float) -> None:
    """Print tokens per second and, with several exits, the mean depth and the number of tokens per exit."""
    rate = Text(f"{len(exits)} tokens, {len(exits) / seconds:.1f} tokens/s")
    exit_layers = config.exit_layers or []
    if len(exit_layers) == 1:
        console.print(rate, soft_wrap=True)
        return
    used = Counter(exits)
    mean_depth = sum(exit_layers[exit_ - 1] for exit_ in exits) / exit_layers[-1] / len(exits)
    parts = [Text(f"exit {k} ({place}): {used[k]}", exit_colour(k)) for k, place in enumerate(config.exit_places, 1)]
    console.print(Text(" · ").join([rate + Text(f", mean depth {mean_depth:.2f}"), *parts]), soft_wrap=True)
