"""`POST /tokenize` and `/detokenize`."""

from typing import Annotated

from pydantic import Field

from server.schemas.body import RequestBody, ResponseBody, Text, check
from server.schemas.foreign import check_foreign
from server.schemas.messages import Messages
from server.schemas.template import TemplateOptions


class TokenizeRequest(TemplateOptions):
    """A prompt or messages, with what chats say of the template."""

    model: Text | None = None
    prompt: Text | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    """Of a prompt, by default yes; a chat template has its own."""
    return_token_strs: bool = False
    """Adds the vocabulary's names of the tokens."""

    def check(self) -> None:
        """Raise `InvalidField` for what does not go together."""
        self.check_neutral()
        check_foreign(self.model_extra or {})
        check((self.prompt is None) != (self.messages is None), "prompt", "give either prompt or messages")
        check(self.messages is not None or not self.tools, "tools", "only allowed with messages")
        given = self.continue_final_message or self.chat_template_kwargs or self.add_generation_prompt
        check(self.messages is not None or not given, "messages", "missing: what is said of the template is for them")
        if self.messages is not None:
            self.check_template(self.messages)
        adds = bool(self.messages and self.add_special_tokens)
        check(not adds, "add_special_tokens", "not supported with messages: the chat template brings its own")


class Tokens(ResponseBody):
    """`token_strs` are the vocabulary's names of the tokens, null if not requested."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeRequest(RequestBody):
    model: Text | None = None
    tokens: Annotated[list[int], Field(fail_fast=True)]


class Detokenized(ResponseBody):
    """Special tokens included."""

    prompt: str


class TokenizerInfo(ResponseBody):
    """Its class as transformers names it, its special tokens by role, and the chat template, if there is one."""

    tokenizer_class: str
    vocab_size: int
    model_max_length: int
    special_tokens: dict[str, str | list[str]]
    chat_template: str | None
