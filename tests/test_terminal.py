"""Continuations and conversations in the terminal: text on one stream, everything else on the other."""

import io
import os
import signal
from collections.abc import Callable

import pytest
from rich.console import Console
from rich.control import strip_control_codes as shown

from nvium_core import LLM
from nvium_core.terminal import Terminal, continue_text, converse
from tests.byte_model import load_byte_model

LOADED = load_byte_model(context=160)
SAMPLING = {"max_tokens": 12, "seed": 3, "ignore_eos": True}


class Streams:
    def __init__(self) -> None:
        self.text, self.remarks = io.StringIO(), io.StringIO()
        self.terminal = Terminal(Console(file=self.text), Console(file=self.remarks, width=200))


@pytest.fixture
def streams() -> Streams:
    return Streams()


@pytest.fixture
def llm() -> LLM:
    return LLM(LOADED, max_sequences=1)


def lines(*said: str) -> Callable[[], str]:
    """Reads these, then the end."""
    remaining = iter(said)

    def read() -> str:
        try:
            return next(remaining)
        except StopIteration:
            raise EOFError from None

    return read


def answer_to(llm: LLM, *said: str) -> str:
    """To the last of questions and answers that take turns."""
    roles = ["user", "assistant"] * len(said)
    return llm.chat([{"role": role, "content": text} for role, text in zip(roles, said, strict=False)], **SAMPLING).text


def test_a_continuation_is_all_that_the_text_stream_gets(streams: Streams, llm: LLM) -> None:
    continue_text(streams.terminal, llm, "Once", SAMPLING)
    assert streams.text.getvalue() == "Once" + shown(llm.generate("Once", **SAMPLING).text) + "\n"
    assert "12 tokens, " in streams.remarks.getvalue()
    assert "mean depth" in streams.remarks.getvalue()


def test_a_conversation_goes_on_from_what_was_said(streams: Streams, llm: LLM) -> None:
    first = answer_to(llm, "Hi")
    second = answer_to(llm, "Hi", first, "More")
    converse(streams.terminal, llm, lines("Hi", "", "More"), None, SAMPLING)
    assert streams.text.getvalue() == f"{shown(first)}\n{shown(second)}\n"


def test_the_oldest_question_is_forgotten_when_the_context_is_full(streams: Streams, llm: LLM) -> None:
    question = "x" * 50
    converse(streams.terminal, llm, lines(question, question, question), None, SAMPLING)
    assert "forgotten" in streams.remarks.getvalue()
    assert streams.remarks.getvalue().count("tokens/s") == 3


def test_an_interruption_ends_the_answer_and_not_the_conversation(streams: Streams, llm: LLM) -> None:
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
