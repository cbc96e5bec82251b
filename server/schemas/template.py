"""What a request says of the chat template, besides its messages."""

import inspect
from collections.abc import Sequence
from typing import Annotated, Any

from transformers import PreTrainedTokenizerBase

from nvium_core.text.chat_template import Conversation
from server.schemas.body import RequestBody, at_most, check
from server.schemas.messages import Message
from server.schemas.tools import Tool, Tools, unique

MAX_TEMPLATE_VARIABLES = 64

OWN_ARGUMENTS = {*inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters, "messages", "template"}
"""What renders a conversation; no variables of a template."""


class TemplateOptions(RequestBody):
    tools: Tools = []
    add_generation_prompt: bool | None = None
    """Whether the prompt begins the assistant's turn; the default unless the last message is continued."""
    continue_final_message: bool = False
    """Whether the answer continues the last message, which is the assistant's."""
    chat_template_kwargs: Annotated[dict[str, Any], at_most(MAX_TEMPLATE_VARIABLES)] = {}
    """Variables of the chat template; not the arguments of `apply_chat_template`."""
    enable_thinking: bool | None = None
    """The same as the template's variable of this name."""

    def continues(self, messages: Sequence[Message]) -> bool:
        """Whether the answer continues the last message."""
        return self.continue_final_message or bool(messages[-1].prefix or messages[-1].partial)

    @property
    def variables(self) -> dict[str, Any]:
        thinks = {} if self.enable_thinking is None else {"enable_thinking": self.enable_thinking}
        return self.chat_template_kwargs | thinks

    def conversation_of(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Conversation:
        """As chat templates expect it."""
        asked, continues = self.add_generation_prompt, self.continues(messages)
        return Conversation(
            [message.for_template() for message in messages],
            [tool.for_template() for tool in unique(tools)],
            not continues if asked is None else asked,
            continues,
            self.variables,
        )

    def check_template(self, messages: Sequence[Message]) -> None:
        """Raise `InvalidField` for a variable that is none, and for a message that cannot be continued."""
        own = next((name for name in self.chat_template_kwargs if name in OWN_ARGUMENTS), None)
        check(own is None, f"chat_template_kwargs.{own}", "not a variable of the template")
        differs = self.chat_template_kwargs.get("enable_thinking", self.variables.get("enable_thinking"))
        check(differs == self.variables.get("enable_thinking"), "enable_thinking", "differs from chat_template_kwargs")
        for number, message in enumerate(messages[:-1]):
            param = f"messages[{number}].{'prefix' if message.prefix else 'partial'}"
            check(not (message.prefix or message.partial), param, "only the last message can be continued")
        *_, last = messages
        fits = last.role == "assistant" and not self.add_generation_prompt and not last.tool_calls
        needs = "needs a last message of the assistant without calls, and no add_generation_prompt"
        check(fits or not self.continues(messages), "continue_final_message", needs)
