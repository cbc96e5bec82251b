"""`POST /tokenize` and `POST /detokenize`."""

from typing import Annotated

from pydantic import BaseModel

from server.schemas.body import MaxItems, RequestBody, Text, require
from server.schemas.json_text import MAX_VALUES
from server.schemas.messages import Messages
from server.schemas.template import TemplateOptions
from server.schemas.unsupported import check_unsupported


class TokenizeRequest(TemplateOptions):
    """A prompt, or messages with the template fields of chats."""

    model: Text | None = None
    """The model's id, or `default`."""
    prompt: Text | None = None
    """A text."""
    messages: Messages | None = None
    """The messages of a chat."""
    add_special_tokens: bool | None = None
    """Add the tokenizer's special tokens to a prompt, by default `true`. Not allowed with messages."""

    def check(self) -> None:
        """Raise `InvalidField` if fields contradict each other."""
        check_unsupported(self)
        require((self.prompt is None) != (self.messages is None), "prompt", "give exactly one of prompt and messages")
        require(self.messages is not None or not self.tools, "tools", "only allowed with messages")
        given = self.continue_final_message or self.chat_template_kwargs or self.add_generation_prompt
        require(self.messages is not None or not given, "messages", "required with fields of the chat template")
        if self.messages is not None:
            self.check_template(self.messages)
        adds = bool(self.messages and self.add_special_tokens)
        require(not adds, "add_special_tokens", "not supported with messages: the chat template adds them")


class Tokens(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]


class DetokenizeRequest(RequestBody):
    model: Text | None = None
    """The model's id, or `default`."""
    tokens: Annotated[list[int], MaxItems(MAX_VALUES)]
    """Token ids."""


class Detokenized(BaseModel):
    """The text of the tokens, including special tokens."""

    prompt: str
