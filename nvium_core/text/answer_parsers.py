"""Parsers of streamed answers: reasoning, and the tool call formats of models.

Reasoning has the format of Qwen3 and SmolLM3: `<think>`, reasoning, `</think>`, answer. Whitespace around tags is
dropped. A call is a name and a JSON object of arguments. All characters around them are fixed by the format, which the
model's chat template tells.
"""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple
from uuid import uuid4

from nvium_core.text.detokenizer import certain_length

OPENING, CLOSING = "<think>", "</think>"
SWITCH = "enable_thinking"
"""The template variable that turns reasoning on or off."""

SPACE = " \n"  # whitespace that may precede a call at the beginning of an answer


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
            begun = self._held.lstrip()
            if begun.startswith(OPENING):
                self.state, self._held = "thinking", begun.removeprefix(OPENING)
            elif not OPENING.startswith(begun):
                self.state = "answer"
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


@dataclass(frozen=True)
class CallFormat:
    """A tool call format.

    An answer with calls consists of `before`, the calls separated by `between`, and `after`. A call consists of
    `beginning`, its name, `middle`, its arguments and `end`.

    trigger: text that opens a call anywhere in an answer. Without a trigger, an answer has either text or calls.
    marker: special token that may precede the calls. It has no text.
    id_length: length of a call's id, which some templates check. None allows any length.
    """

    before: str = ""
    beginning: str = '{"name": "'
    middle: str = '", "arguments": '
    end: str = "}"
    between: str = "\n"
    after: str = ""
    trigger: str = ""
    marker: str = ""
    id_length: int | None = None

    def new_id(self) -> str:
        return f"call_{uuid4().hex}" if self.id_length is None else uuid4().hex[: self.id_length]


JSON_LINES = CallFormat()  # for models without a template: `{"name": …, "arguments": …}`, one per line

HERMES = CallFormat(beginning='<tool_call>\n{"name": "', end="}\n</tool_call>", trigger="<tool_call>\n")
"""Hermes and Qwen: the format `JSON_LINES` in tags. Text may precede the calls."""

LLAMA = CallFormat(middle='", "parameters": ', between="; ", marker="<|python_tag|>")
MISTRAL = CallFormat(before="[", between=", ", after="]", marker="[TOOL_CALLS]", id_length=9)

SIGNS: dict[str, CallFormat | None] = {
    "<parameter=": None,
    "<tool_call>": HERMES,
    "[ARGS]": None,
    MISTRAL.marker: MISTRAL,
    LLAMA.marker: LLAMA,
    '"parameters": ': LLAMA,
}
"""Substring of a template → its format. The most specific substrings come first.

None stands for formats that are not supported: Qwen3-Coder's, whose arguments are not JSON, and Mistral's since v11.
"""


def call_format(template: str | None) -> CallFormat | None:
    """Return the format that a chat template uses, or None if it is not supported."""
    return next((form for sign, form in SIGNS.items() if sign in (template or "")), JSON_LINES)


class CallPiece(NamedTuple):
    """An increment of call `number`: its complete name and id, or more of its arguments as JSON text."""

    number: int
    name: str = ""
    arguments: str = ""
    id: str = ""


class ContentAndCalls(NamedTuple):
    content: str
    calls: list[CallPiece]


@dataclass
class ToolCallParser:
    """Splits a streamed answer into text and calls. The joined result does not depend on the chunks."""

    form: CallFormat = JSON_LINES
    is_complete: bool = field(default=False, init=False)
    """Whether the arguments of the latest call are complete."""
    _state: Literal["start", "text", "name", "arguments", "between"] = field(default="start", init=False)
    held: str = field(default="", init=False)
    """The buffered text."""
    _index: int = field(default=-1, init=False)
    _depth: int = field(default=0, init=False)
    _in_string: bool = field(default=False, init=False)
    _escaped: bool = field(default=False, init=False)

    def push(self, text: str) -> ContentAndCalls:
        """Add text and return what can be emitted. Text that may begin a call, and incomplete names, are buffered."""
        self.held += text
        content, calls, before = "", list[CallPiece](), None
        while before != (before := (self._state, self.held)):
            match self._state:
                case "start":
                    content += self._read_start()
                case "text":
                    content, self.held = content + self.held, ""
                case "name":
                    calls += self._read_name()
                case "arguments":
                    calls += self._read_arguments()
                case "between":
                    _, found, rest = self.held.partition(self.form.beginning)
                    self._state, self.held = ("name", rest) if found else ("between", self.held)
        return ContentAndCalls(content, calls)

    def flush(self) -> str:
        """Return the buffered text at the end of the answer. Drop an incomplete call."""
        held, self.held = self.held, ""
        return held if self._state in ("start", "text") else ""

    def _read_start(self) -> str:
        """Return text that may precede a call."""
        if not self.form.trigger:
            opening, begun = self.form.before + self.form.beginning, self.held.lstrip(SPACE)
            if begun.startswith(opening):
                self._state, self.held = "name", begun.removeprefix(opening)
            elif not opening.startswith(begun):
                self._state = "text"
            return ""
        content, found, rest = self.held.partition(self.form.beginning)
        if found:
            self._state, self.held = "name", rest
        else:
            certain = certain_length(self.held, [self.form.beginning])
            content, self.held = self.held[:certain], self.held[certain:]
        return content

    def _read_name(self) -> list[CallPiece]:
        name, found, rest = self.held.partition(self.form.middle)
        if not found:
            return []
        self._state, self.held, self.is_complete = "arguments", rest, False
        self._index += 1
        return [CallPiece(self._index, name, id=self.form.new_id())]

    def _read_arguments(self) -> list[CallPiece]:
        length = next((n for n, character in enumerate(self.held, start=1) if self._ends(character)), len(self.held))
        arguments, self.held = self.held[:length], self.held[length:]
        self._state = "between" if self.is_complete else "arguments"
        return [CallPiece(self._index, arguments=arguments)] if arguments else []

    def _ends(self, character: str) -> bool:
        """Return whether this character closes the arguments. Call it for each character: it counts open brackets."""
        if self._in_string:
            self._in_string = self._escaped or character != '"'
            self._escaped = character == "\\" and not self._escaped
        elif character == '"':
            self._in_string = True
        else:
            self._depth += (character in "{[") - (character in "}]")
            self.is_complete = self._depth == 0
        return self.is_complete
