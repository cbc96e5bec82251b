"""Ends an answer before a tool call that repeats an earlier one."""

from dataclasses import dataclass, field

from nvium_core.text.tool_calls import CallFormat, ToolCallReader


@dataclass
class RepeatedCalls:
    """Passes text through. Buffers a tool call until its name or arguments differ from those of all earlier calls."""

    form: CallFormat
    has_ended: bool = field(default=False, init=False)
    """Whether a call was repeated. The repeated call's text is dropped."""
    _reader: ToolCallReader = field(init=False)
    _made: set[tuple[str, str]] = field(default_factory=set, init=False)
    _name: str | None = field(default=None, init=False)
    _arguments: str = field(default="", init=False)
    _held: str = field(default="", init=False)

    def __post_init__(self) -> None:
        self._reader = ToolCallReader(self.form)

    def push(self, text: str) -> str:
        """Add text and return the text that can be emitted. If `has_ended`, return nothing."""
        certain = ""
        for character in "" if self.has_ended else text:
            self._held += character
            has_call = self._ends_call(character)
            if has_call and self._repeats():
                self.has_ended, self._held = True, ""
                break
            if has_call or not self._may_repeat():
                certain, self._held = certain + self._held, ""
        return certain

    def flush(self) -> str:
        """Return the buffered text at the end of the answer."""
        held, self._held = self._held, ""
        return held

    def _ends_call(self, character: str) -> bool:
        pieces = self._reader.push(character).calls
        for piece in pieces:
            self._name = piece.name or self._name
            self._arguments += piece.arguments
        return bool(pieces) and self._reader.is_complete

    def _repeats(self) -> bool:
        """Record the completed call. Return whether an earlier call was the same."""
        call = (self._name or "", self._arguments)
        is_known = call in self._made
        self._made.add(call)
        self._name, self._arguments = None, ""
        return is_known

    def _may_repeat(self) -> bool:
        if self._name is None:
            return bool(self._made)
        return any(name == self._name and made.startswith(self._arguments) for name, made in self._made)
