"""A tool call as the model writes it, `{"name": "NAME", "arguments": ARGUMENTS}`, and its reading piece by piece.

All but NAME and ARGUMENTS, which is a JSON object, is fixed byte for byte. Knows nothing of engines, grammars or HTTP.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

BEGINNING = '{"name": "'
MIDDLE = '", "arguments": '
END = "}"


class ToolCallPiece(NamedTuple):
    """What a text added: the name, given once and whole, and more of the arguments' JSON text."""

    name: str = ""
    arguments: str = ""


@dataclass
class ToolCallReader:
    """Splits a tool call that comes in pieces; what is joined does not depend on where the text was cut."""

    is_complete: bool = field(default=False, init=False)
    """The arguments have been given to their last character."""
    _head: str | None = field(default="", init=False)
    """The text up to the arguments, as long as they have not begun."""
    _depth: int = field(default=0, init=False)
    _in_string: bool = field(default=False, init=False)
    _escaped: bool = field(default=False, init=False)

    def push(self, text: str) -> ToolCallPiece:
        """The next of the text: what it adds. Nothing is held back but an unfinished name."""
        if self._head is None:
            return ToolCallPiece(arguments=self._of_arguments(text))
        self._head += text
        name, found, rest = self._head.removeprefix(BEGINNING).partition(MIDDLE)
        if not found:
            return ToolCallPiece()
        self._head = None
        return ToolCallPiece(name, self._of_arguments(rest))

    def _of_arguments(self, text: str) -> str:
        """The part of the text that belongs to the arguments."""
        for place, character in enumerate(text):
            if self.is_complete:
                return text[:place]
            self._note(character)
        return text

    def _note(self, character: str) -> None:
        """Keep track of strings and of what is open."""
        if self._in_string:
            self._in_string = self._escaped or character != '"'
            self._escaped = character == "\\" and not self._escaped
        elif character == '"':
            self._in_string = True
        else:
            self._depth += (character in "{[") - (character in "}]")
            self.is_complete = self._depth == 0
