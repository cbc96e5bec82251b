"""Separates the reasoning from the answer in a model's output.

The format is that of Qwen3 and SmolLM3: `<think>`, reasoning, `</think>`, answer. Whitespace around tags is dropped.
"""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from nvium_core.text.detokenizer import certain_length

OPENING, CLOSING = "<think>", "</think>"
SWITCH = "enable_thinking"
"""The template variable that turns reasoning on or off."""


class ReasoningAndAnswer(NamedTuple):
    reasoning: str
    answer: str


def thinks(template: object) -> bool:
    return isinstance(template, str) and OPENING in template and CLOSING in template


@dataclass
class ReasoningParser:
    """Splits a streamed output into reasoning and answer. The joined result does not depend on the chunks.

    The initial `state` must be "thinking" if the prompt ends with `<think>`, and "answer" if the model does not reason.
    """

    state: Literal["start", "thinking", "between", "answer"] = "start"
    _held: str = field(default="", init=False)
    _num_read: int = field(default=0, init=False)
    _has_thought: bool = field(default=False, init=False)
    num_characters: int = field(default=0, init=False)
    """Number of characters read so far that belong to the reasoning or its tags."""

    def push(self, text: str) -> ReasoningAndAnswer:
        """Add text and return what can be emitted. Text that may begin a tag, and spaces before it, are buffered."""
        self._held += text
        self._num_read += len(text)
        reasoning = ""
        if self.state == "start":
            self._start()
        if self.state == "thinking":
            reasoning = self._think()
        if self.state == "between":
            self._held = self._held.lstrip()
            self.state = "answer" if self._held else "between"
        return ReasoningAndAnswer(reasoning, self.flush().answer if self.state == "answer" else "")

    def flush(self) -> ReasoningAndAnswer:
        held, self._held = self._held, ""
        is_reasoning = self.state == "thinking"
        return ReasoningAndAnswer(held.rstrip(), "") if is_reasoning else ReasoningAndAnswer("", held)

    def _start(self) -> None:
        begun = self._held.lstrip()
        if begun.startswith(OPENING):
            self.state, self._held = "thinking", begun.removeprefix(OPENING)
        elif not OPENING.startswith(begun):
            self.state = "answer"

    def _think(self) -> str:
        if not self._has_thought:
            self._held = self._held.lstrip()
        thought, found, rest = self._held.partition(CLOSING)
        self.num_characters = self._num_read - len(rest)
        if found:
            self.state, self._held = "between", rest
            return thought.rstrip()
        certain = len(self._held[: certain_length(self._held, [CLOSING])].rstrip())
        thought, self._held = self._held[:certain], self._held[certain:]
        self._has_thought = self._has_thought or bool(thought)
        return thought
