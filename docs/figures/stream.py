"""Records a story as it streams and draws it as an animated SVG, each token in the tone of its exit.

    python docs/figures/stream.py docs/figures/stream.svg --seed 3

Order and rhythm are the stream's own, slowed down to be readable.
"""

import argparse
import time
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from nvium_core import LLM

TONES = ("#c08418", "#2b8c8a", "#31559a", "#3f1d63", "#6d0a1e", "#94411c")
"""The playground's tones, from the first exit to the last."""

COLUMNS, SIZE, LINE = 74, 15, 26
ADVANCE = 0.6 * SIZE
MARGIN = 22
PLAY_SECONDS, REST_SECONDS = 9.0, 4.0


class Told(NamedTuple):
    """A piece of a stream: its time in seconds after the first, its text and its exit."""

    at: float
    text: str
    exit: int


def record(llm: LLM, prompt: str, num_tokens: int, seed: int) -> list[Told]:
    pieces = llm.stream(prompt, max_tokens=num_tokens, seed=seed, temperature=0.7, top_p=0.95)
    told = [Told(time.monotonic(), piece.text, piece.exits[0]) for piece in pieces]
    return [Told(at - told[0].at, drawable(text), exit_) for at, text, exit_ in told]


def drawable(text: str) -> str:
    """On one line, without characters that XML forbids."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def placed(told: Sequence[Told], prompt: str) -> list[tuple[int, int, Told]]:
    """Column and line of each piece; a word that does not fit begins a line."""
    column, line, places = len(prompt), 0, []
    for piece in told:
        text = piece.text
        if column + len(text) > COLUMNS:
            column, line, text = 0, line + 1, text.lstrip()
        places.append((column, line, piece._replace(text=text)))
        column += len(text)
    return places


def drawn(told: Sequence[Told], prompt: str, exit_layers: Sequence[int]) -> str:
    places = placed(told, prompt)
    height = 2 * MARGIN + LINE * (places[-1][1] + 1) + LINE
    width = 2 * MARGIN + COLUMNS * ADVANCE
    scale = PLAY_SECONDS / max(told[-1].at, 1e-9)
    font = 'font-family="ui-monospace, Menlo, Consolas, monospace"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" {font} font-size="{SIZE}">',
        "<title>A story as it streams, each token in the colour of its exit</title>",
        '<rect width="100%" height="100%" rx="8" fill="#fbfaf7"/>',
        word(0, 0, prompt, "#62656d"),
        *(
            word(column, line, piece.text, TONES[(piece.exit - 1) % len(TONES)], piece.at * scale)
            for column, line, piece in places
        ),
        legend(exit_layers, height - MARGIN + 6),
        "</svg>\n",
    ]
    return "\n".join(parts)


def word(column: int, line: int, text: str, colour: str, at: float | None = None) -> str:
    x, y = MARGIN + column * ADVANCE, MARGIN + SIZE + line * LINE
    spoken = "" if at is None else appearing(at)
    fitted = f'textLength="{len(text) * ADVANCE:.1f}" lengthAdjust="spacingAndGlyphs"' if text else ""
    return f'<text x="{x:.1f}" y="{y}" fill="{colour}" xml:space="preserve" {fitted}>{escape(text)}{spoken}</text>'


def appearing(at: float) -> str:
    whole = PLAY_SECONDS + REST_SECONDS
    timing = f'dur="{whole:g}s" keyTimes="0;{at / whole:.4f}" calcMode="discrete" repeatCount="indefinite"'
    return f'<animate attributeName="opacity" values="0;1" {timing}/>'


def legend(exit_layers: Sequence[int], y: float) -> str:
    parts = [
        f'<tspan fill="{TONES[number % len(TONES)]}">exit {number + 1}</tspan> layer {layer}'
        for number, layer in enumerate(exit_layers)
    ]
    return f'<text x="{MARGIN}" y="{y}" font-size="12" fill="#62656d">{" · ".join(parts)} · slowed down</text>'


def main(arguments: Sequence[str] | None = None) -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("file", type=Path)
    options.add_argument("--model", help="a folder or Hub name; the bundled model if left out")
    options.add_argument("--prompt", default="Once upon a time")
    options.add_argument("--tokens", type=int, default=72)
    options.add_argument("--seed", type=int, default=1)
    asked = options.parse_args(arguments)
    llm = LLM(asked.model, dtype="float32")
    record(llm, asked.prompt, 8, asked.seed)  # so that nothing is computed for the first time below
    told = record(llm, asked.prompt, asked.tokens, asked.seed)
    exit_layers = llm.loaded.model.config.exit_layers or []
    asked.file.write_text(drawn(told, asked.prompt, exit_layers), encoding="utf-8")


if __name__ == "__main__":
    main()
