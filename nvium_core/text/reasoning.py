"""What a model thinks before it answers, as Qwen3 and SmolLM3 mark it: `<think>`, thoughts, `</think>`, the answer.

Line breaks and spaces around the marks belong to neither. Knows nothing of engines or HTTP.
"""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

OPENING, CLOSING = "<think>", "</think>"


class Thought(NamedTuple):
    """Pieces of reasoning and of the answer."""

    reasoning: str
    answer: str


def thinks(template: object) -> bool:
    """Whether a chat template supports reasoning."""
    return isinstance(template, str) and OPENING in template and CLOSING in template


@dataclass
class ReasoningReader:
    """Splits a streamed answer into reasoning and answer; the joined result does not depend on the chunks. `state` at
    the start: `thinking` if the prompt has opened the thoughts, `answer` if there are none."""

    state: Literal["start", "thinking", "between", "answer"] = "start"
    _held: str = field(default="", init=False)
    _num_read: int = field(default=0, init=False)
    _has_thought: bool = field(default=False, init=False)
    num_characters: int = field(default=0, init=False)
    """Characters read so far that belong to the reasoning and its marks."""

    def push(self, text: str) -> Thought:
        """Add text; return what is certain. Holds back what may become a mark, and the space before one."""
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
        return Thought(reasoning, self.flush().answer if self.state == "answer" else "")

    def flush(self) -> Thought:
        """The text still held back, as no mark follows."""
        held, self._held = self._held, ""
        return Thought(held.rstrip(), "") if self.state == "thinking" else Thought("", held)

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
        longest = min(len(CLOSING) - 1, len(self._held))
        mark = next((n for n in range(longest, 0, -1) if CLOSING.startswith(self._held[-n:])), 0)
        certain = len(self._held[: len(self._held) - mark].rstrip())
        thought, self._held = self._held[:certain], self._held[certain:]
        self._has_thought = self._has_thought or bool(thought)
        return thought
