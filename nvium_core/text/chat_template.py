"""From messages to token ids: the tokenizer's chat template or, without one, a plain one.

Special tokens come from the template only. In messages and tools they are text: each is cut after its first character
before the template is rendered, and the text between cuts is tokenized piece by piece. No HTTP, no engine.
"""

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from nvium_core.errors import NviumError
from nvium_core.text.reasoning import OPENING, ReasoningReader, thinks
from nvium_core.text.tool_calls import call_format

Json = dict[str, Any]

MAX_REASON_CHARACTERS = 200
"""Of a template's error message."""

LAST_TOKENS = 16
"""Of a prompt; the mark that opens thoughts is among them, if it ends with one."""

PLAIN_STOPS = ("\nUser:", "\n\nUser:", "\nUser (", "\n\nUser (")
"""The model begins the user's turn, after an answer to the plain template."""


@dataclass(frozen=True)
class Conversation:
    """The input of a chat template. `adds_prompt` begins the assistant's turn; `continues` leaves the last message
    open. `variables` are passed to the template."""

    messages: Sequence[Json]
    tools: Sequence[Json] = ()
    adds_prompt: bool = True
    continues: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)


class ConversationError(NviumError, ValueError):
    """Messages that the chat template refuses, or a template that is none."""


class ChatTemplate:
    """`stops` and `stop_token_ids` end the assistant's turn, beside the model's end-of-text. `call_format` is the
    model's format of tool calls, None if it is not supported; `call_tokens` are the ids of its special tokens. Raises
    `ConversationError` for a template that cannot be read, which would refuse every conversation."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        check_readable(tokenizer.chat_template)
        self._tokenizer = tokenizer
        self._is_plain = not tokenizer.chat_template
        special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
        longest_first = sorted(map(re.escape, special), key=len, reverse=True)
        self._special = re.compile(f"(?=(?:{'|'.join(longest_first)}))(.)", re.DOTALL) if special else None
        self.call_format = call_format(tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else None)
        of_calls = (self.call_format.marker, *self.call_format.tokens) if self.call_format else ()
        self.call_tokens = {text: tokenizer.get_added_vocab()[text] for text in of_calls if text in special}
        self.thinks = thinks(tokenizer.chat_template)
        end = tokenizer.eos_token_id
        self.stops = PLAIN_STOPS if self._is_plain else ()
        self.stop_token_ids: tuple[int, ...] = () if self._is_plain or end is None else (end,)

    def token_ids(self, messages: Sequence[Json], tools: Sequence[Json], *, adds_prompt: bool = True) -> list[int]:
        """Raises `ConversationError`."""
        return self.prompt(Conversation(messages, tools, adds_prompt))

    def prompt(self, conversation: Conversation, *, check: Callable[[str], object] | None = None) -> list[int]:
        """The conversation's tokens. `check` sees the text before it is tokenized; its errors pass through. Raises
        `ConversationError` for what the template refuses."""
        mark = secrets.token_hex(16)
        try:
            given = {name: self._cut(getattr(conversation, name), mark) for name in ("messages", "tools", "variables")}
            text = self._render(replace(conversation, **given))
            text.encode()
        except RecursionError as error:
            raise ConversationError("they or the tools are nested too deeply") from error
        except UnicodeEncodeError as error:  # JSON within JSON, in a call's arguments or a tool's parameters
            raise ConversationError("they and the tools must be valid Unicode") from error
        if check:
            check(text.replace(mark, ""))
        first, *others = text.split(mark)
        begun: list[int] = self._tokenizer(first, add_special_tokens=self._is_plain).input_ids
        pieces = self._tokenizer.backend_tokenizer.encode_batch_fast(others, add_special_tokens=False)
        return list(chain(begun, *(piece.ids for piece in pieces)))

    def reasoning_reader(self, prompt: Sequence[int], *, is_continued: bool = False) -> ReasoningReader:
        """For an answer to this prompt, which may have opened the thoughts; `is_continued`: from its beginning."""
        if not self.thinks:
            return ReasoningReader("answer")
        if is_continued:
            return ReasoningReader()
        end: str = self._tokenizer.backend_tokenizer.decode(list(prompt[-LAST_TOKENS:]), skip_special_tokens=False)
        return ReasoningReader("thinking" if end.rstrip().endswith(OPENING) else "start")

    def _cut(self, said: Any, mark: str) -> Any:
        """The same with a mark inside every special token."""
        if isinstance(said, str):
            return self._special.sub(rf"\g<1>{mark}", said) if self._special else said
        if isinstance(said, Mapping):
            return {self._cut(name, mark): self._cut(value, mark) for name, value in said.items()}
        return [self._cut(item, mark) for item in said] if isinstance(said, list | tuple) else said

    def _render(self, conversation: Conversation) -> str:
        if self._is_plain:
            return plain(conversation)
        functions: list[Any] | None = list(conversation.tools) or None
        try:
            text = self._tokenizer.apply_chat_template(
                list(conversation.messages),
                tools=functions,
                add_generation_prompt=conversation.adds_prompt,
                continue_final_message=conversation.continues,
                tokenize=False,
                **conversation.variables,
            )
        except Exception as error:  # a template may do anything with what it is given
            raise ConversationError(f"the model's chat template refuses them{reason(error)}") from error
        assert isinstance(text, str)
        return text


def check_readable(template: Any) -> None:
    """One, several by name, or none."""
    for text in template.values() if isinstance(template, dict) else [template] if template else []:
        try:
            render_jinja_template(conversations=[], chat_template=text)
        except Exception as error:  # of jinja, or of what takes a number for a text
            raise ConversationError(f"the model's chat template cannot be read{reason(error)}") from error


def plain(conversation: Conversation) -> str:
    """Turns as in a script: a line with the role, the text, an empty line. The system message stands alone, preceded by
    the functions, one a line. A name is in brackets after the role; a call is written as one is generated."""
    functions = [json_text(tool["function"]) for tool in conversation.tools]
    turns = ["\n".join(["Functions:", *functions])] if functions else []
    turns += [plain_turn(message) for message in conversation.messages]
    text = "".join(f"{turn}\n\n" for turn in turns)
    return text.removesuffix("\n\n") if conversation.continues else text + "Assistant:\n" * conversation.adds_prompt


def plain_turn(message: Json) -> str:
    calls = [json_text(call["function"]) for call in message.get("tool_calls", ())]
    lines = [text for text in (message["content"], *calls) if text]
    name = f" ({message['name']})" if "name" in message else ""
    heading = [] if message["role"] == "system" and not name else [f"{message['role'].capitalize()}{name}:"]
    return "\n".join(heading + lines)


def json_text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def reason(error: Exception) -> str:
    """A template's error message, without details of code."""
    if not isinstance(error, TemplateError) or not error.message:
        return ""
    return f": {error.message[:MAX_REASON_CHARACTERS]}"
