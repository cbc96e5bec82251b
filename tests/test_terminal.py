import io
import os
import re
import signal
from collections.abc import Callable
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from rich.color import Color, ColorSystem
from rich.console import Console
from rich.control import strip_control_codes as shown

from nvium_core import LLM
from nvium_core.commands.running import typed_line
from nvium_core.terminal import EXIT_COLOURS, Lines, Terminal, continue_text, converse
from tests.byte_model import load_byte_model

LOADED = load_byte_model(context=160)
SAMPLING = {"max_tokens": 12, "seed": 3, "ignore_eos": True}


@pytest.fixture
def streams() -> SimpleNamespace:
    """A terminal, and what was written to its text and its remarks."""
    text, remarks = io.StringIO(), io.StringIO()
    terminal = Terminal(Console(file=text), Console(file=remarks, width=200))
    return SimpleNamespace(text=text, remarks=remarks, terminal=terminal)


@pytest.fixture
def llm() -> LLM:
    return LLM(LOADED, max_sequences=1)


def lines(*messages: str) -> Callable[[], str]:
    return Mock(side_effect=[*messages, EOFError])


def answer_to(llm: LLM, *turns: str) -> str:
    """Answer the last of alternating questions and answers."""
    messages = [{"role": ("user", "assistant")[k % 2], "content": text} for k, text in enumerate(turns)]
    return llm.chat(messages, **SAMPLING).text


def test_only_prompt_and_continuation_go_to_the_text_stream(streams, llm):
    continue_text(streams.terminal, llm, "Once", SAMPLING)
    assert streams.text.getvalue() == "Once" + shown(llm.generate("Once", **SAMPLING).text) + "\n"
    assert "12 tokens, " in streams.remarks.getvalue()
    assert "mean depth" in streams.remarks.getvalue()


def test_a_conversation_includes_earlier_turns(streams, llm):
    first = answer_to(llm, "Hi")
    second = answer_to(llm, "Hi", first, "More")
    converse(streams.terminal, llm, lines("Hi", "", "More"), None, SAMPLING)
    assert streams.text.getvalue() == f"{shown(first)}\n{shown(second)}\n"


def test_the_oldest_turns_are_dropped_when_the_context_is_full(streams, llm):
    question = "x" * 50
    converse(streams.terminal, llm, lines(question, question, question), None, SAMPLING)
    assert "context full" in streams.remarks.getvalue()
    assert streams.remarks.getvalue().count("tokens/s") == 3


def test_an_unknown_command_is_no_message(streams, llm):
    converse(streams.terminal, llm, lines("/quit now"), None, SAMPLING)
    assert "unknown command /quit" in streams.remarks.getvalue()
    assert not streams.text.getvalue()


def test_an_interruption_ends_the_answer_and_not_the_conversation(streams, llm):
    first = answer_to(llm, "Hi")

    class Interrupting(io.StringIO):
        def write(self, text: str) -> int:
            if not self.tell():
                os.kill(os.getpid(), signal.SIGINT)
            return super().write(text)

    text = Interrupting()
    converse(Terminal(Console(file=text), streams.terminal.remarks), llm, lines("Hi", "/reset", "Hi"), None, SAMPLING)
    cut, whole, _ = text.getvalue().rsplit("\n", 2)
    assert whole == shown(first)
    assert whole.startswith(cut)
    assert len(cut) < len(whole)
    assert not llm.engine.has_work


LEAST_CONTRAST = {"#ffffff": 4.5, "#000000": 4.5, "#1e1e1e": 3, "#fdf6e3": 3, "#002b36": 3}
"""By the backgrounds of common themes. On white and on black, it is WCAG's level AA."""


def luminance(colour: Color) -> float:
    """Return WCAG's relative luminance."""
    parts = colour.get_truecolor().normalized
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * v for weight, v in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize(("system", "share"), [(ColorSystem.TRUECOLOR, 1), (ColorSystem.EIGHT_BIT, 0.94)])
@pytest.mark.parametrize("background", LEAST_CONTRAST)
def test_every_colour_is_legible_on_light_and_on_dark_themes(background, system, share):
    behind = luminance(Color.parse(background)) + 0.05
    colours = [Color.parse(colour).downgrade(system) for colour in EXIT_COLOURS]
    ratios = [(luminance(colour) + 0.05) / behind for colour in colours]
    assert min(max(ratio, 1 / ratio) for ratio in ratios) >= share * LEAST_CONTRAST[background]
    assert len(set(colours)) == len(colours)


def screen(written: str) -> str:
    """Return what a terminal shows after the output, of which it erases the parts that the output takes back."""
    while erased := re.search(r"\x1b\[(\d+)D\x1b\[0K", written):
        kept = written[: erased.start() - int(erased[1])]
        written = kept + written[erased.end() :]
    return written


@pytest.mark.parametrize(
    ("pieces", "shown"),
    [
        (["one two", " three"], "one two \nthree"),
        (["one two th", "re", "e", " four"], "one two \nthree four"),
        (["one two", " thr", "ee\n\nfour"], "one two \nthree\n\nfour"),
        (["abcdefghijklmnop q"], "abcdefghijklmnop q"),
        (["a 日本語", "の文章です"], "a 日本語の文章です"),
    ],
)
def test_a_word_that_does_not_fit_its_line_moves_to_the_next(pieces, shown):
    text = io.StringIO()
    lines = Lines(Console(file=text, force_terminal=True, color_system=None, width=12, _environ={}))
    for piece in pieces:
        lines.write(piece, "dim")
    assert screen(text.getvalue()) == shown


def test_the_end_of_input_ends_the_line_of_the_prompt(monkeypatch, capsys):
    monkeypatch.setattr("builtins.input", Mock(side_effect=EOFError))
    with pytest.raises(EOFError):
        typed_line()
    assert capsys.readouterr().err == "\n"
