"""Records a streamed story as an animated SVG, each token in the colour of its exit.

    python docs/figures/stream.py docs/figures/stream.svg --seed 8

The animation has the stream's timing, slowed down.
"""

import argparse
import time
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from nvium_core import LLM

COLOURS = ("#c08418", "#2b8c8a", "#31559a", "#3f1d63", "#6d0a1e", "#94411c")
"""The playground's colours, from the first exit to the last."""

COLUMNS, SIZE, LINE = 74, 15, 26
ADVANCE = 0.6 * SIZE
MARGIN = 22
PLAY_SECONDS, REST_SECONDS = 9.0, 4.0


class Piece(NamedTuple):
    """A piece of a stream. `at` is in seconds after the first piece."""

    at: float
    text: str
    exit: int


def record(llm: LLM, prompt: str, num_tokens: int, seed: int) -> list[Piece]:
    pieces = llm.stream(prompt, max_tokens=num_tokens, seed=seed, temperature=0.7, top_p=0.95)
    timed = [Piece(time.monotonic(), piece.text, piece.exits[0]) for piece in pieces]
    return [Piece(at - timed[0].at, drawable(text), exit_) for at, text, exit_ in timed]


def drawable(text: str) -> str:
    """Replace line breaks and characters that XML forbids by spaces."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def placed(pieces: Sequence[Piece], prompt: str) -> list[tuple[int, int, Piece]]:
    """Return column and line of each piece; a piece that does not fit begins a new line."""
    column, line, places = len(prompt), 0, []
    for piece in pieces:
        text = piece.text
        if column + len(text) > COLUMNS:
            column, line, text = 0, line + 1, text.lstrip()
        places.append((column, line, piece._replace(text=text)))
        column += len(text)
    return places


def drawn(pieces: Sequence[Piece], prompt: str, exit_layers: Sequence[int]) -> str:
    places = placed(pieces, prompt)
    height = 2 * MARGIN + LINE * (places[-1][1] + 1) + LINE
    width = 2 * MARGIN + COLUMNS * ADVANCE
    scale = PLAY_SECONDS / max(pieces[-1].at, 1e-9)
    font = 'font-family="ui-monospace, Menlo, Consolas, monospace"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" {font} font-size="{SIZE}">',
        "<title>A story as it streams, each token in the colour of its exit</title>",
        '<rect width="100%" height="100%" rx="8" fill="#fbfaf7"/>',
        word(0, 0, prompt, "#62656d"),
        *(
            word(column, line, piece.text, COLOURS[(piece.exit - 1) % len(COLOURS)], piece.at * scale)
            for column, line, piece in places
        ),
        legend(exit_layers, height - MARGIN + 6),
        "</svg>\n",
    ]
    return "\n".join(parts)


def word(column: int, line: int, text: str, colour: str, at: float | None = None) -> str:
    x, y = MARGIN + column * ADVANCE, MARGIN + SIZE + line * LINE
    animation = "" if at is None else appearing(at)
    fitted = f'textLength="{len(text) * ADVANCE:.1f}" lengthAdjust="spacingAndGlyphs"' if text else ""
    return f'<text x="{x:.1f}" y="{y}" fill="{colour}" xml:space="preserve" {fitted}>{escape(text)}{animation}</text>'


def appearing(at: float) -> str:
    whole = PLAY_SECONDS + REST_SECONDS
    timing = f'dur="{whole:g}s" keyTimes="0;{at / whole:.4f}" calcMode="discrete" repeatCount="indefinite"'
    return f'<animate attributeName="opacity" values="0;1" {timing}/>'


def legend(exit_layers: Sequence[int], y: float) -> str:
    parts = [
        f'<tspan fill="{COLOURS[number % len(COLOURS)]}">exit {number + 1}</tspan> layer {layer}'
        for number, layer in enumerate(exit_layers)
    ]
    return f'<text x="{MARGIN}" y="{y}" font-size="12" fill="#62656d">{" · ".join(parts)} · slowed down</text>'


def main(arguments: Sequence[str] | None = None) -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("file", type=Path)
    options.add_argument("--model", help="a folder or Hub name [the bundled model]")
    options.add_argument("--prompt", default="Once upon a time")
    options.add_argument("--tokens", type=int, default=72)
    options.add_argument("--seed", type=int, default=1)
    given = options.parse_args(arguments)
    llm = LLM(given.model, dtype="float32")
    record(llm, given.prompt, 8, given.seed)  # warm up
    pieces = record(llm, given.prompt, given.tokens, given.seed)
    exit_layers = llm.loaded.model.config.exit_layers or []
    given.file.write_text(drawn(pieces, given.prompt, exit_layers), encoding="utf-8")


if __name__ == "__main__":
    main()
