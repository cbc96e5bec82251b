"""Generated text in the terminal: every token in the colour of its exit on stdout, statistics on stderr."""

import signal
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

from nvium_core.engine.params import ContextLengthExceeded
from nvium_core.llm import LLM, Message, Piece

EXIT_COLOURS = ["bright_cyan", "bright_green", "bright_yellow", "bright_magenta", "bright_blue", "bright_red", "white"]

Stream = Generator[Piece, None, None]

HELP = "Ctrl-D ends, Ctrl-C stops an answer, /reset forgets the conversation."


@dataclass(frozen=True)
class Terminal:
    """Consoles for text and for everything else."""

    text: Console
    remarks: Console


def both_streams() -> Terminal:
    return Terminal(Console(highlight=False), Console(stderr=True, highlight=False))


def continue_text(terminal: Terminal, llm: LLM, prompt: str, sampling: dict[str, Any]) -> None:
    """Print the prompt and its continuation, then statistics."""
    pieces = llm.stream(prompt, **sampling)
    terminal.text.print(Text(prompt, "dim"), end="", soft_wrap=True)
    show(terminal, llm, pieces)


def converse(
    terminal: Terminal, llm: LLM, read: Callable[[], str], system: str | None, sampling: dict[str, Any]
) -> None:
    """Answer messages until the input ends. The oldest turns are dropped when the context is full."""
    beginning: list[Message] = [{"role": "system", "content": system}] if system else []
    turns: list[Message] = []
    terminal.remarks.print(HELP, style="dim")
    while (said := next_line(read)) is not None:
        if said == "/reset":
            turns.clear()
        elif said:
            turns.append({"role": "user", "content": said})
            with interruption() as is_interrupted:
                answered = show(terminal, llm, fitting(terminal, llm, beginning, turns, sampling), is_interrupted)
            turns.append({"role": "assistant", "content": answered})


def next_line(read: Callable[[], str]) -> str | None:
    """None at the end of the input."""
    try:
        return read().strip()
    except EOFError:
        return None


def fitting(
    terminal: Terminal, llm: LLM, beginning: Sequence[Message], turns: list[Message], sampling: dict[str, Any]
) -> Stream:
    """The answer's stream, after dropping the oldest question and answer until the rest fits."""
    while True:
        try:
            return llm.stream([*beginning, *turns], **sampling)
        except ContextLengthExceeded:
            if len(turns) == 1:
                turns.clear()
                raise
            del turns[:2]
            terminal.remarks.print("(the context is full; the oldest question is forgotten)", style="dim")


@contextmanager
def interruption() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed. It has no other effect within the context, so it never interrupts a Step."""
    asked: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _frame: asked.append(number))
    try:
        yield lambda: bool(asked)
    finally:
        signal.signal(signal.SIGINT, before)


def show(terminal: Terminal, llm: LLM, pieces: Stream, is_stopped: Callable[[], bool] = lambda: False) -> str:
    """Print a stream piece by piece until it ends or is stopped."""
    exits: list[int] = []
    said: list[str] = []
    started = time.monotonic()
    with closing(pieces):
        for piece in pieces:
            exits += piece.exits
            said.append(piece.text)
            terminal.text.print(Text(piece.text, exit_colour(piece.exits[-1])), end="", soft_wrap=True)
            if is_stopped():
                break
    terminal.text.print()
    if exits:
        summarise(terminal.remarks, exits, llm.loaded.model.config.exit_layers or [], time.monotonic() - started)
    return "".join(said)


def exit_colour(exit_number: int) -> str:
    return EXIT_COLOURS[(exit_number - 1) % len(EXIT_COLOURS)]


def summarise(console: Console, exits: Sequence[int], exit_layers: Sequence[int], seconds: float) -> None:
    """Tokens per second; with several exits also mean depth and tokens by exit."""
    rate = Text(f"{len(exits)} tokens, {len(exits) / seconds:.1f} tokens/s")
    if len(exit_layers) == 1:
        console.print(rate, soft_wrap=True)
        return
    used = Counter(exits)
    mean_depth = sum(exit_layers[exit_ - 1] for exit_ in exits) / exit_layers[-1] / len(exits)
    parts = [Text(f"exit {k} (layer {depth}): {used[k]}", exit_colour(k)) for k, depth in enumerate(exit_layers, 1)]
    console.print(Text(" · ").join([rate + Text(f", mean depth {mean_depth:.2f}"), *parts]), soft_wrap=True)
