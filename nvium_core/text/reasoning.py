"""What a model thinks before it answers, as Qwen3 and SmolLM3 mark it: `<think>`, thoughts, `</think>`, the answer.

Line breaks and spaces around the marks belong to neither. Knows nothing of engines or HTTP.
"""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

OPENING, CLOSING = "<think>", "</think>"


class Thought(NamedTuple):
    """What a text is: reasoning, and what follows it."""

    reasoning: str
    answer: str


def thinks(template: object) -> bool:
    """Whether a chat template knows thoughts."""
    return isinstance(template, str) and OPENING in template and CLOSING in template


@dataclass
class ReasoningReader:
    """Splits an answer that comes in pieces; what is joined does not depend on the cuts.

    `state` is where it begins: `thinking` if the prompt has opened the thoughts already, `answer` if there are none.
    """

    state: Literal["start", "thinking", "between", "answer"] = "start"
    _held: str = field(default="", init=False)
    _num_read: int = field(default=0, init=False)
    _has_thought: bool = field(default=False, init=False)
    num_characters: int = field(default=0, init=False)
    """Of the text read so far, those of the reasoning and its marks."""

    def push(self, text: str) -> Thought:
        """The next of the text: what it adds. Held back is what may yet be a mark, or the space before one."""
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
        """What was held back for a mark that did not come."""
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
