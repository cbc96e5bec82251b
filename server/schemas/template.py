"""What a request says of the chat template, besides its messages."""

from collections.abc import Sequence
from typing import Annotated, Any

from nvium_core.text.chat_template import Conversation
from server.schemas.body import RequestBody, at_most, check
from server.schemas.messages import Message
from server.schemas.tools import Tool, Tools

MAX_TEMPLATE_VARIABLES = 64


class TemplateOptions(RequestBody):
    tools: Tools = []
    add_generation_prompt: bool | None = None
    """Whether the prompt begins the assistant's turn; the default unless the last message is continued."""
    continue_final_message: bool = False
    """Whether the answer continues the last message, which is the assistant's."""
    chat_template_kwargs: Annotated[dict[str, Any], at_most(MAX_TEMPLATE_VARIABLES)] = {}
    """Variables of the chat template."""

    def conversation_of(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Conversation:
        """As chat templates expect it."""
        asked, continues = self.add_generation_prompt, self.continue_final_message
        return Conversation(
            [message.for_template() for message in messages],
            [tool.for_template() for tool in tools],
            not continues if asked is None else asked,
            continues,
            self.chat_template_kwargs,
        )

    def check_continued(self, messages: Sequence[Message]) -> None:
        """Raise `InvalidField` if no message can be continued."""
        fits = not self.continue_final_message or (messages[-1].role == "assistant" and not self.add_generation_prompt)
        check(fits, "continue_final_message", "needs a last message of the assistant, and no add_generation_prompt")
