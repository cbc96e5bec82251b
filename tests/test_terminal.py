import io
import os
import signal
from collections.abc import Callable
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from rich.console import Console
from rich.control import strip_control_codes as shown

from nvium_core import LLM
from nvium_core.terminal import Terminal, continue_text, converse
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
