"""The tool call formats of models, and a streaming parser.

A call is a name and a JSON object of arguments. All characters around them are fixed by the format. The model's chat
template tells which format the model uses.
"""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple
from uuid import uuid4

from nvium_core.text.detokenizer import certain_length

SPACE = " \n"  # whitespace that may precede a call at the beginning of an answer


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
        parsed = ContentAndCalls("", [])
        while (added := getattr(self, f"_read_{self._state}")()) is not None:
            parsed = ContentAndCalls(parsed.content + added.content, parsed.calls + added.calls)
        return parsed

    def flush(self) -> str:
        """Return the buffered text at the end of the answer. Drop an incomplete call."""
        held, self.held = self.held, ""
        return held if self._state in ("start", "text") else ""

    def _read_start(self) -> ContentAndCalls | None:
        if self.form.trigger:
            return self._read_after_text()
        opening, begun = self.form.before + self.form.beginning, self.held.lstrip(SPACE)
        if begun.startswith(opening):
            self._state, self.held = "name", begun.removeprefix(opening)
            return ContentAndCalls("", [])
        if opening.startswith(begun):
            return None
        self._state = "text"
        return ContentAndCalls("", [])

    def _read_after_text(self) -> ContentAndCalls | None:
        content, found, rest = self.held.partition(self.form.beginning)
        if found:
            self._state, self.held = "name", rest
            return ContentAndCalls(content, [])
        certain = certain_length(self.held, [self.form.beginning])
        content, self.held = self.held[:certain], self.held[certain:]
        return ContentAndCalls(content, []) if content else None

    def _read_text(self) -> ContentAndCalls | None:
        content, self.held = self.held, ""
        return ContentAndCalls(content, []) if content else None

    def _read_name(self) -> ContentAndCalls | None:
        name, found, rest = self.held.partition(self.form.middle)
        if not found:
            return None
        self._state, self.held, self.is_complete = "arguments", rest, False
        self._index += 1
        return ContentAndCalls("", [CallPiece(self._index, name, id=self.form.new_id())])

    def _read_arguments(self) -> ContentAndCalls | None:
        if not self.held:
            return None
        length = next((n for n, character in enumerate(self.held, start=1) if self._ends(character)), len(self.held))
        arguments, self.held = self.held[:length], self.held[length:]
        if self.is_complete:
            self._state = "between"
        return ContentAndCalls("", [CallPiece(self._index, arguments=arguments)])

    def _read_between(self) -> ContentAndCalls | None:
        _, found, rest = self.held.partition(self.form.beginning)
        if not found:
            return None
        self._state, self.held = "name", rest
        return ContentAndCalls("", [])

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
