"""Request fields that control the chat template."""

import inspect
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from transformers import PreTrainedTokenizerBase

from nvium_core.text.chat_template import ChatTemplate, Conversation
from nvium_core.text.reasoning import SWITCH
from server.errors import InvalidField
from server.schemas.body import MaxItems, RequestBody, require
from server.schemas.json_text import JsonError, check_counts
from server.schemas.messages import Message
from server.schemas.tools import CustomTool, Tool, Tools, unique

OWN_ARGUMENTS = {*inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters, "messages", "template"}
"""Parameters of the renderer, which `chat_template_kwargs` must not set."""


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class TemplateOptions(RequestBody):
    tools: Tools = []
    add_generation_prompt: bool | None = None
    """Start the assistant's turn at the end of the prompt. By default `true`, unless the last message is continued."""
    continue_final_message: bool = False
    """Continue the last message, which must be the assistant's."""
    chat_template_kwargs: Annotated[dict[str, Any], MaxItems(64)] = {}
    """Variables for the chat template, except arguments of `apply_chat_template`."""
    enable_thinking: bool | None = None
    """The template variable of the same name."""
    reasoning_effort: Effort | None = None
    """`none` sets `enable_thinking` to false, other values to true, unless it is given. Ignored if the template has no
    such variable."""

    def conversation_of(self, messages: Sequence[Message], tools: Sequence[Tool | CustomTool]) -> Conversation:
        """Return the arguments of the chat template. Raise `InvalidField` if tools contradict each other."""
        last, continues = messages[-1], self.continue_final_message
        if continues and len(messages) > 1 and not (last.text or last.reasoning_content):
            messages, continues = messages[:-1], False  # nothing to continue, so begin the turn
        adds_prompt = not continues and (self.continue_final_message or self.add_generation_prompt is not False)
        thinks = {} if self.enable_thinking is None else {SWITCH: self.enable_thinking}
        effort = {} if self.reasoning_effort is None else {SWITCH: self.reasoning_effort != "none"}
        return Conversation(
            [message.for_template() for message in messages],
            [tool.for_template() for tool in unique(tools)],
            adds_prompt,
            continues,
            effort | self.chat_template_kwargs | thinks,
        )

    def ineffective(self, template: ChatTemplate) -> list[str]:
        """Return the names of fields that have no effect on this template."""
        is_given = self.enable_thinking is not None or SWITCH in self.chat_template_kwargs
        has_effect = self.reasoning_effort is None or (template.switches_thinking and not is_given)
        return [] if has_effect else [self.name_of("reasoning_effort")]

    def check_template(self, messages: Sequence[Message]) -> None:
        """Raise `InvalidField` for a reserved template variable or a message that cannot be continued."""
        own = next((name for name in self.chat_template_kwargs if name in OWN_ARGUMENTS), None)
        require(own is None, f"chat_template_kwargs.{own}", "not allowed: an argument of apply_chat_template")
        thinking = self.chat_template_kwargs.get(SWITCH, self.enable_thinking)
        agrees = self.enable_thinking in (None, thinking)
        require(agrees, "enable_thinking", "must equal chat_template_kwargs.enable_thinking")
        arguments = [call.function.arguments for message in messages for call in message.tool_calls]
        try:
            check_counts(*(text.encode() for text in arguments))
        except JsonError as error:
            raise InvalidField("messages", f"the JSON in the arguments of tool calls {error}") from error
        last = messages[-1]
        fits = last.role == "assistant" and not self.add_generation_prompt and not last.tool_calls
        needs = "requires a last message of role assistant without tool calls, and no add_generation_prompt"
        require(fits or not self.continue_final_message, "continue_final_message", needs)
