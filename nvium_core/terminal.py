"""Prints generated text to stdout, each token in the colour of its exit. Prints statistics to stderr."""

import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.control import Control
from rich.segment import ControlType
from rich.text import Text

from nvium_core.engine.errors import ContextLengthExceeded
from nvium_core.llm import LLM, Message, Piece
from nvium_core.model.config import NviumConfig

EXIT_COLOURS = ["#b06000", "#008484", "#5f5fff", "#d700af", "#af5f5f", "#508300", "#767676"]
"""As far from white as from black. They are fixed colours, which a terminal's theme does not change."""

Stream = Generator[Piece, None, None]

HELP = "Ctrl-D quits, Ctrl-C stops the answer, /reset starts a new conversation."


@dataclass(frozen=True)
class Terminal:
    """Consoles for generated text (stdout) and for everything else (stderr)."""

    text: Console = field(default_factory=lambda: Console(highlight=False))
    remarks: Console = field(default_factory=lambda: Console(stderr=True, highlight=False))


def continue_text(terminal: Terminal, llm: LLM, prompt: str, sampling: dict[str, Any]) -> None:
    pieces = llm.stream(prompt, **sampling)
    lines = Lines(terminal.text)
    lines.write(prompt, "dim")
    show(terminal, llm, pieces, lines)


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
                pieces = stream_answer(terminal, llm, beginning, turns, sampling)
                answer = show(terminal, llm, pieces, Lines(terminal.text), is_interrupted)
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


class Lines:
    """Prints text as it arrives. On a terminal, a word that does not fit its line moves to the next line."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._wraps = console.is_terminal and not console.is_dumb_terminal
        self._column = 0
        self._word: list[Text] = []
        """The parts of the last word, if the next part may continue it."""

    def write(self, text: str, style: str) -> None:
        for part in re.findall(r"\s|\S+", text) if self._wraps else [text]:
            self._write(Text(part, style))

    def _write(self, part: Text) -> None:
        width, is_space = self._console.width, part.plain.isspace()
        is_wide = part.cell_len > len(part)  # such as Chinese, which may break anywhere
        if self._wraps and self._column + part.cell_len >= width and not is_wide:
            if is_space:
                part = Text("\n")
            else:
                self._move_word()
        self._print(part)
        self._column = 0 if part.plain == "\n" else (self._column + part.cell_len) % width
        self._word = [] if is_space or is_wide else [*self._word, part]

    def _move_word(self) -> None:
        """Move the last word to the next line, unless the line begins with it."""
        length = sum(part.cell_len for part in self._word)
        if length == self._column:
            return
        if length:
            self._console.control(Control((ControlType.CURSOR_BACKWARD, length), (ControlType.ERASE_IN_LINE, 0)))
        self._print(Text.assemble("\n", *self._word))
        self._column = length

    def _print(self, text: Text) -> None:
        self._console.print(text, end="", soft_wrap=True)


def show(
    terminal: Terminal, llm: LLM, pieces: Stream, lines: Lines, is_stopped: Callable[[], bool] = lambda: False
) -> str:
    """Print a stream until it ends or `is_stopped` returns true, then print statistics. Return the stream's text."""
    exits: list[int] = []
    texts: list[str] = []
    started = time.monotonic()
    with closing(pieces):
        for piece in pieces:
            exits += piece.exits
            texts.append(piece.text)
            lines.write(piece.text, exit_colour(piece.exits[-1]))
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
    line = Text(f"{len(exits)} tokens, {len(exits) / seconds:.1f} tokens/s")
    exit_layers = config.exit_layers or []
    if len(exit_layers) > 1:
        used = Counter(exits)
        mean_depth = sum(exit_layers[exit_ - 1] for exit_ in exits) / exit_layers[-1] / len(exits)
        line.append(f", mean depth {mean_depth:.2f}")
        for exit_, place in enumerate(config.exit_places, 1):
            line.append(" · ").append(f"exit {exit_} ({place}): {used[exit_]}", exit_colour(exit_))
    console.print(line, soft_wrap=not console.is_terminal)
