"""Tokenizes conversations with the tokenizer's chat template or, without one, with a default template.

Only the template may produce special tokens. If a message or tool contains the text of a special token, this text stays
plain: before rendering, a mark is inserted after its first character, and the pieces between marks are tokenized
separately. Some tokenizers prepend a space to every text. For these, each piece is tokenized after a line break, and
the line break's tokens are dropped.
"""

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from nvium_core.errors import NviumError
from nvium_core.text.answer_parsers import CLOSING, OPENING, SWITCH, ReasoningParser, call_format, thinks
from nvium_core.text.renderer import RENDERER, RenderingError
from nvium_core.text.rendering import rendered

Json = dict[str, Any]

IM_END = "<|im_end|>"
"""The token that ends a turn in ChatML templates. Some tokenizers name another token as end-of-text (Ouro)."""

LAST_TOKENS = 16  # number of tokens at the end of a prompt in which `<think>` and `</think>` are searched

DEFAULT_BREAK = "\n\n"
"""For a model without a template: what separates the turns of `DEFAULT_TEMPLATE`, instead of end-of-text."""

DEFAULT_STOPS = ("\nUser:", "\n\nUser:", "\nUser (", "\n\nUser (")
"""Stop strings for a model without a template. They begin the next user turn."""

CHAT_TEMPLATE = """\
{%- if tools %}
    {{- bos_token + 'Functions:' }}
    {%- for tool in tools %}
        {{- '\\n' + tool.function | tojson }}
    {%- endfor %}
{%- endif %}
{%- for message in messages %}
    {{- bos_token + message.role | capitalize + (' (' + message.name + ')' if message.name else '') + ':' }}
    {%- if message.content %}
        {{- '\\n' + message.content | trim }}
    {%- endif %}
    {%- for call in message.tool_calls or [] %}
        {{- '\\n' + call.function | tojson }}
    {%- endfor %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- bos_token + 'Assistant:\\n' }}
{%- endif %}
"""
"""The template of models that nvium tunes: every turn is a document that begins with its role.

Messages cannot contain end-of-text, the only special token, so a user cannot fake a turn. This template takes linear
time, so it needs no sandbox process.
"""

DEFAULT_TEMPLATE = CHAT_TEMPLATE.replace(" | trim", "")
"""The template of models without one. It keeps spaces, so that a continued message keeps its last space."""


@dataclass(frozen=True)
class Conversation:
    """The input of a chat template.

    adds_prompt: end the prompt with the beginning of the assistant's turn.
    continues: leave the last message open, so that the model continues this message.
    variables: additional variables for the template.
    """

    messages: Sequence[Json]
    tools: Sequence[Json] = ()
    adds_prompt: bool = True
    continues: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)


class ConversationError(NviumError, ValueError):
    """The chat template is invalid, or it rejects the messages or, if `field` says so, the tools."""

    def __init__(self, message: str, field: str = "messages") -> None:
        super().__init__(message)
        self.field = field


class ChatTemplate:
    """A tokenizer's chat template. Messages of role `developer` are rendered as `system` messages.

    Raise `ConversationError` if the template cannot be parsed.

    stops, stop_token_ids: end the assistant's turn, in addition to the model's end-of-text. Use `ends`.
    call_format: the model's tool call format, or None if it is not supported.
    call_marker: id of the special token that may precede calls, or None.
    thinks, switches_thinking: whether the template supports reasoning, and reads the variable `SWITCH`.
    opening, closing: the tokens of the tags around reasoning.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        check_readable(tokenizer)
        self._tokenizer = tokenizer
        self._uses_default = not tokenizer.chat_template
        template = tokenizer.chat_template
        if isinstance(template, dict):
            template = template.get("tool_use", template["default"])  # transformers renders tools with "tool_use"
        special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
        longest_first = sorted(map(re.escape, special), key=len, reverse=True)
        self._special = re.compile(f"(?=(?:{'|'.join(longest_first)}))(.)", re.DOTALL) if special else None
        self.call_format = call_format(template)
        marker = self.call_format.marker if self.call_format else ""
        self.call_marker: int | None = tokenizer.get_added_vocab()[marker] if marker in special else None
        self.thinks, self.switches_thinking = thinks(template), SWITCH in (template or "")
        backend = tokenizer.backend_tokenizer
        self._break: list[int] = backend.encode("\n", add_special_tokens=False).ids
        self._has_prefix = self._continued("a") != backend.encode("a", add_special_tokens=False).ids
        self.opening, self.closing = self._continued(OPENING), self._continued(CLOSING)
        self._has_tools = self._uses_default or self._renders_tools(template or "")
        self.stops = DEFAULT_STOPS if self._uses_default else ()
        ends = {tokenizer.eos_token_id, tokenizer.get_added_vocab().get(IM_END) if IM_END in (template or "") else None}
        self.stop_token_ids: tuple[int, ...] = () if self._uses_default else tuple(sorted(ends - {None}))

    def ends(self, *, ignore_eos: bool = False) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Return the stop tokens and stop strings. `ignore_eos` drops both, as in vLLM."""
        return ((), ()) if ignore_eos else (self.stop_token_ids, self.stops)

    def token_ids(self, messages: Sequence[Json], tools: Sequence[Json], *, adds_prompt: bool = True) -> list[int]:
        return self.prompt(Conversation(messages, tools, adds_prompt))

    def prompt(self, conversation: Conversation, *, check: Callable[[str], object] | None = None) -> list[int]:
        """Render, call `check` with the text, and tokenize. Raise `ConversationError` if rendering fails."""
        mark = secrets.token_hex(16)
        uses_tools = conversation.tools or any(message.get("tool_calls") for message in conversation.messages)
        if uses_tools and not self._has_tools:
            raise ConversationError(
                "the model's chat template does not support tools; choose another with --chat-template FILE",
                "tools" if conversation.tools else "messages",
            )
        try:
            given = {name: self._cut(getattr(conversation, name), mark) for name in ("messages", "tools", "variables")}
            text = self._render(replace(conversation, **given))
            text.encode()
        except RecursionError as error:
            raise ConversationError("messages or tools are nested too deeply") from error
        except UnicodeEncodeError as error:  # lone surrogates in a call's arguments or a tool's parameters
            raise ConversationError("messages and tools must be valid Unicode") from error
        if check:
            check(text.replace(mark, ""))
        first, *others = text.split(mark)
        begun: list[int] = self._tokenizer(first, add_special_tokens=self._uses_default, verbose=False).input_ids
        lead, num_dropped = ("\n", len(self._break)) if self._has_prefix else ("", 0)
        continued = [lead + piece for piece in others]
        pieces = self._tokenizer.backend_tokenizer.encode_batch_fast(continued, add_special_tokens=False)
        return list(chain(begun, *(piece.ids[num_dropped:] for piece in pieces)))

    def _continued(self, text: str) -> list[int]:
        """Tokenize a text that follows another one."""
        ids: list[int] = self._tokenizer.backend_tokenizer.encode(f"\n{text}", add_special_tokens=False).ids
        return ids[len(self._break) :]

    def _renders_tools(self, template: str) -> bool:
        """Return whether a rendered prompt contains the name of a tool."""
        name = secrets.token_hex(8)
        function = {"name": name, "description": name, "parameters": {"type": "object", "properties": {}}}
        tools = [{"type": "function", "function": function}]
        try:
            return name in self._render(Conversation([{"role": "user", "content": "a"}], tools))
        except ConversationError:
            return "tools" in template

    def reasoning_parser(self, prompt: Sequence[int], continued: str = "") -> ReasoningParser:
        """Return a parser for the answer to a prompt that ends with `continued`, a part of the answer."""
        if not self.thinks:
            return ReasoningParser("answer")
        if continued:
            parser = ReasoningParser()
            parser.push(continued)
            return parser
        end: str = self._tokenizer.backend_tokenizer.decode(list(prompt[-LAST_TOKENS:]), skip_special_tokens=False)
        if end.rstrip().endswith(OPENING):
            return ReasoningParser("thinking")
        return ReasoningParser("answer" if end.rstrip().endswith(CLOSING) else "start")

    def _cut(self, value: Any, mark: str) -> Any:
        """In all strings of a JSON value, insert `mark` after the first character of each special token."""
        if isinstance(value, str):
            return self._special.sub(lambda found: found[1] + mark, value) if self._special else value
        if isinstance(value, Mapping):
            return {self._cut(name, mark): self._cut(item, mark) for name, item in value.items()}
        return [self._cut(item, mark) for item in value] if isinstance(value, list | tuple) else value

    def _render(self, conversation: Conversation) -> str:
        tools: list[Any] | None = list(conversation.tools) or None
        template = DEFAULT_TEMPLATE if self._uses_default else self._tokenizer.get_chat_template(None, tools)
        tokens = {"bos_token": DEFAULT_BREAK} if self._uses_default else self._tokenizer.special_tokens_map
        is_ours = template in (CHAT_TEMPLATE, DEFAULT_TEMPLATE) and not conversation.variables
        try:
            text = (rendered if is_ours else RENDERER.render)(
                template=template,
                messages=[m | {"role": "system"} if m.get("role") == "developer" else m for m in conversation.messages],
                tools=tools,
                add_generation_prompt=conversation.adds_prompt,
                continue_final_message=conversation.continues,
                **tokens | dict(conversation.variables),
            )
        except RenderingError as error:
            raise ConversationError(f"the model's chat template {error}") from error
        return text.removeprefix(DEFAULT_BREAK) if self._uses_default else text


def check_readable(tokenizer: PreTrainedTokenizerFast) -> None:
    """Raise `ConversationError` unless every template can be parsed."""
    template: Any = tokenizer.chat_template
    file = Path(tokenizer.name_or_path, "chat_template.jinja")
    place = f"{file if file.is_file() else tokenizer.name_or_path}: " if tokenizer.name_or_path else ""
    if isinstance(template, dict) and "default" not in template:
        raise ConversationError(
            f"{place}the model has chat templates {', '.join(map(str, template))}, but no default; choose one with "
            "--chat-template FILE"
        )
    for text in template.values() if isinstance(template, dict) else [template] if template else []:
        if text == CHAT_TEMPLATE:
            continue
        try:
            if not isinstance(text, str):
                raise RenderingError("cannot be parsed")
            RENDERER.render(template=text, messages=[])
        except RenderingError as error:
            raise ConversationError(f"{place}the chat template {error}") from error
