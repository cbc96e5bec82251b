"""Drops the oldest messages of a conversation that exceeds the context."""

from bisect import bisect_left
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cache

from nvium_core.text.chat_template import Conversation, ConversationError
from server.errors import InvalidField

DEFAULT_SHARE = 4
"""A truncated prompt leaves room for the maximum number of tokens or, by default, for this part of the context."""

MAX_TRIES = 4
"""Number of consecutive cuts to try if the template refuses one, such as for roles that do not alternate."""


def truncated(
    conversation: Conversation, render: Callable[[Conversation], list[int]], context: int, max_tokens: int | None
) -> list[int]:
    """Return the prompt without the fewest messages from the front, so that it and the answer fit the context.

    System messages at the beginning and the last message are kept, and tool results are dropped with their calls.
    `render` returns a prompt. It may raise `InvalidField` for one that is too long.
    """
    messages = conversation.messages
    first = next((n for n, message in enumerate(messages) if message["role"] not in ("system", "developer")), 0)
    cuts = [n for n in range(first, len(messages)) if messages[n]["role"] != "tool"] or [first]

    def without(cut: int) -> list[int]:
        return render(replace(conversation, messages=[*messages[:first], *messages[cut:]]))

    @cache
    def prompt(number: int) -> list[int]:
        """Return the prompt after cut `number`, or after the next one that the template accepts."""
        *others, last = cuts[number : number + MAX_TRIES]
        for cut in others:
            with suppress(ConversationError):
                return without(cut)
        return without(last)

    def fits(number: int, num_left: int) -> bool:
        with suppress(InvalidField):
            return len(prompt(number)) + num_left <= context
        return False

    if fits(0, max_tokens or 1):
        return prompt(0)
    num_left = max_tokens or context // DEFAULT_SHARE
    return prompt(bisect_left(range(len(cuts) - 1), True, key=lambda number: fits(number, num_left)))
