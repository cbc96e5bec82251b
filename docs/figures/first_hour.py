"""Records a first hour in a terminal as an animated SVG: a story, a chat, a call of a tool, a model of one's own.

    python docs/figures/first_hour.py docs/figures/first-hour.svg

The commands are carried out as they stand, in a folder of their own. Pauses are cut to a second.
"""

import argparse
import json
import os
import pty
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from html import escape
from pathlib import Path
from typing import NamedTuple

from rich.ansi import AnsiDecoder
from rich.console import Console
from rich.terminal_theme import DIMMED_MONOKAI

ROWS, COLUMNS, SIZE, LINE = 26, 92, 14, 20
ADVANCE, MARGIN = 0.6 * SIZE, 18
FOREGROUND, BACKGROUND, SIGN = "#d8d8d2", "#1e1f1c", "#8ec07c"
MAX_PAUSE, KEY_SECONDS, REST_SECONDS = 1.0, 0.03, 5.0
PORT = 8792
CONSOLE = Console(width=10_000, color_system="truecolor", force_terminal=True)

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Bern", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 7}},
            "required": ["city", "days"],
        },
    },
}
ASKED = {
    "model": "default",
    "messages": [{"role": "user", "content": "Will it rain?"}],
    "tools": [TOOL],
    "tool_choice": "required",
    "seed": 1,
}
ANIMALS, PLACES = ("fox", "crow", "hen", "cat"), ("wood", "barn", "field")


class Step(NamedTuple):
    """A command as it is shown, what is typed whenever it asks, and whether it goes on in the background."""

    command: str
    typed: tuple[str, ...] = ()
    goes_on: bool = False


END, ASKING = "\x04", "> "

STEPS = (
    Step('nvium generate --prompt "Once upon a time" --max-tokens 70 --seed 7'),
    Step("nvium chat --seed 3 --max-tokens 60", ("Tell me a tale of a fox.\n", END)),
    Step(f"nvium serve --port {PORT}", goes_on=True),
    Step("cat question.json"),
    Step(
        f"curl -s localhost:{PORT}/v1/chat/completions -d @question.json | python -m json.tool --indent 1"
        " | grep -A 6 tool_calls"
    ),
    Step(
        "nvium train tiny --data tales.txt --no-compile --set total_tokens=32768 --set shape.vocab_size=300 2>&1"
        " | tail -4"
    ),
    Step('nvium generate runs/tiny/model --prompt "The fox" --max-tokens 30 --seed 2'),
)


class Told(NamedTuple):
    """Text that came, at so many seconds from the beginning of its command."""

    at: float
    text: str


class Piece(NamedTuple):
    at: float
    row: int
    column: int
    text: str
    colour: str


def carried_out(step: Step, folder: Path) -> tuple[list[Told], subprocess.Popen[bytes]]:
    """What a command writes to a terminal, until it ends or, in the background, is ready."""
    ours, theirs = pty.openpty()
    environment = os.environ | {
        "COLUMNS": str(COLUMNS),
        "LINES": str(ROWS),
        "TERM": "xterm-256color",
        "COLORTERM": "truecolor",
    }
    bin_folder = str(Path(sys.executable).parent)
    environment["PATH"] = f"{bin_folder}:{environment['PATH']}"
    process = subprocess.Popen(
        ["bash", "-c", f"stty cols {COLUMNS} rows {ROWS}; exec {step.command}" if step.goes_on else step.command],
        stdin=theirs, stdout=theirs, stderr=theirs, cwd=folder, env=environment, start_new_session=True,
    )  # fmt: skip
    os.close(theirs)
    return list(told_by(ours, step.typed, until="Ready." if step.goes_on else None)), process


def told_by(descriptor: int, typed: Sequence[str], until: str | None) -> Iterator[Told]:
    started, everything, left = time.monotonic(), "", [*typed]
    with suppress(OSError):  # the terminal's end
        while data := os.read(descriptor, 65_536):
            text = data.decode(errors="replace")
            everything += text
            yield Told(time.monotonic() - started, text)
            if left and everything.endswith(ASKING):
                os.write(descriptor, left.pop(0).encode())
            if until and until in everything and everything.endswith("\n"):
                return


def question(folder: Path) -> None:
    (folder / "question.json").write_text(json.dumps(ASKED, indent=1) + "\n", encoding="utf-8")
    tales = [f"The {a}\n\nA {a} met a {b} in the {c}.\n" for a in ANIMALS for b in ANIMALS for c in PLACES if a != b]
    (folder / "tales.txt").write_text("<|endoftext|>\n".join(tales * 4), encoding="utf-8")


def recorded() -> list[Told]:
    """All commands one after the other, with pauses cut; the prompt sign is `\\x00`."""
    told: list[Told] = []
    clock, background = 0.0, []
    with tempfile.TemporaryDirectory() as name:
        question(folder := Path(name))
        for step in STEPS:
            for letter in f"\x00{step.command}{' &' if step.goes_on else ''}\n":
                clock += KEY_SECONDS
                told.append(Told(clock, letter))
            pieces, process = carried_out(step, folder)
            last = 0.0
            for piece in pieces:
                clock += min(piece.at - last, MAX_PAUSE)
                last = piece.at
                told.append(Told(clock, piece.text))
            clock += MAX_PAUSE
            if step.goes_on:
                background.append(process)
            else:
                process.wait()
        for process in background:
            process.terminate()
            process.wait()
    return told


def laid_out(told: Sequence[Told]) -> list[Piece]:
    """Each run of one colour in its place; lines that are too long go on in the next one."""
    decoder, pieces, row, column = AnsiDecoder(), list[Piece](), 0, 0
    for at, text in told:
        for number, line in enumerate(text.replace("\r\n", "\n").replace("\r", "").split("\n")):
            row, column = (row + 1, 0) if number else (row, column)
            decoded = decoder.decode_line(line)
            decoded.end = ""
            for segment in decoded.render(CONSOLE):
                colour = segment.style.color if segment.style and segment.style.color else None
                shade = colour.get_truecolor(DIMMED_MONOKAI).hex if colour else FOREGROUND
                rest = segment.text.replace("\x00", "$ ")
                while rest:
                    part, rest = rest[: COLUMNS - column], rest[COLUMNS - column :]
                    pieces.append(Piece(at, row, column, part, SIGN if part == "$ " else shade))
                    column += len(part)
                    if rest or column == COLUMNS:
                        row, column = row + 1, 0
    return [piece for piece in pieces if piece.text.strip()]


def drawn(pieces: Sequence[Piece]) -> str:
    """The terminal as a column of lines that moves up behind a window of `ROWS`."""
    whole = pieces[-1].at + REST_SECONDS
    width, height = 2 * MARGIN + COLUMNS * ADVANCE, 2 * MARGIN + ROWS * LINE
    scrolls = [(0.0, 0)]
    for piece in pieces:
        if piece.row - ROWS + 1 > scrolls[-1][1]:
            scrolls.append((piece.at, piece.row - ROWS + 1))
    values = ";".join(f"0 {-LINE * lines}" for _, lines in scrolls)
    times = ";".join(f"{at / whole:.4f}" for at, _ in scrolls)
    moving = (
        f'<animateTransform attributeName="transform" type="translate" values="{values}" keyTimes="{times}" '
        f'dur="{whole:.1f}s" calcMode="discrete" repeatCount="indefinite"/>'
    )
    font = 'font-family="ui-monospace, Menlo, Consolas, monospace"'
    window = f'<clipPath id="w"><rect y="{MARGIN - 4}" width="100%" height="{ROWS * LINE + 8}"/></clipPath>'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" {font} font-size="{SIZE}">',
            "<title>A first hour in a terminal: a story, a chat, a call of a tool, a model of one's own</title>",
            f'<rect width="100%" height="100%" rx="8" fill="{BACKGROUND}"/>{window}',
            f'<g clip-path="url(#w)"><g>{moving}',
            *(drawn_piece(piece, whole) for piece in joined(pieces)),
            "</g></g></svg>\n",
        ]
    )


def joined(pieces: Sequence[Piece]) -> list[Piece]:
    """Neighbours of one moment and colour as one."""
    together: list[Piece] = []
    for piece in pieces:
        last = together[-1] if together else None
        follows = last and (last.row, last.column + len(last.text), last.colour) == (
            piece.row,
            piece.column,
            piece.colour,
        )
        if last and follows and piece.at - last.at < 2 * KEY_SECONDS:
            together[-1] = last._replace(text=last.text + piece.text)
        else:
            together.append(piece)
    return together


def drawn_piece(piece: Piece, whole: float) -> str:
    x, y = MARGIN + piece.column * ADVANCE, MARGIN + SIZE + piece.row * LINE
    shown = (
        f'<animate attributeName="opacity" values="0;1" dur="{whole:.1f}s" keyTimes="0;{piece.at / whole:.4f}" '
        'calcMode="discrete" repeatCount="indefinite"/>'
    )
    length = f'textLength="{len(piece.text) * ADVANCE:.1f}" lengthAdjust="spacingAndGlyphs"'
    place = f'x="{x:.1f}" y="{y}" fill="{piece.colour}" xml:space="preserve" {length}'
    return f"<text {place}>{escape(piece.text)}{shown}</text>"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    asked = parser.parse_args()
    asked.file.write_text(drawn(laid_out(recorded())), encoding="utf-8")


if __name__ == "__main__":
    main()
