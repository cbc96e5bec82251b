"""Renders chat templates in a helper process with limited time and memory, because a template is untrusted code.

The helper runs `rendering.serve`. This module imports nothing slow, so that a helper starts before the libraries load.
"""

import json
import os
from contextlib import suppress
from typing import Any

from nvium_core.text.sandbox import Helper, HelperLost, HelperStuck

Json = dict[str, Any]

MAX_SECONDS = 1  # CPU time for one conversation
MAX_BYTES = 256 * 2**20  # additional memory for rendering

NESTED = "cannot render messages or tools that are nested too deeply"


class RenderingError(Exception):
    """Rendering failed. The message continues a sentence that begins with "the model's chat template"."""


class Renderer:
    """A pool of helpers. Threads that render at the same time use different helpers."""

    def __init__(self) -> None:
        self._idle: list[Helper] = []
        os.register_at_fork(after_in_child=self._idle.clear)

    def prepare(self) -> None:
        """Start a helper, which takes a second, and do not wait for it. Do nothing if an unused one is there."""
        if all(helper.has_begun for helper in self._idle):
            self._idle.append(new_helper())

    def end_unused(self) -> None:
        """End the helpers that have rendered nothing."""
        for helper in [helper for helper in self._idle if not helper.has_begun]:
            with suppress(ValueError):  # another thread renders with it now
                self._idle.remove(helper)

    def render(self, **arguments: Any) -> str:
        """Call `rendered` in a helper. Arguments must be JSON values. Raise `RenderingError` on failure."""
        try:
            message = json.dumps(arguments).encode()
        except RecursionError as error:
            raise RenderingError(NESTED) from error
        try:
            reply: Json = json.loads(self._reply(message))
        except HelperStuck:
            raise
        except HelperLost as error:
            limits = f"{MAX_SECONDS} s, {MAX_BYTES >> 20} MB or the maximum length of text"
            raise RenderingError(f"exceeds {limits}") from error
        if "error" in reply:
            raise RenderingError(reply["error"])
        return str(reply["text"])

    def _reply(self, message: bytes) -> bytes:
        """Ask a helper. If it ended before its first message, or was stopped, ask a new one."""
        helper = self._idle_helper()
        try:
            reply = helper.ask(message)
        except HelperLost as error:
            may_repeat = helper.has_begun or isinstance(error, HelperStuck)
            if may_repeat and not helper.was_stopped:
                raise
            helper = new_helper()
            reply = helper.ask(message)
        self._idle.append(helper)
        return reply

    def _idle_helper(self) -> Helper:
        while self._idle:
            helper = self._idle.pop()
            if not (helper.has_begun and helper.has_news):
                return helper
        return new_helper()


def new_helper() -> Helper:
    return Helper.spawn("nvium_core.text.rendering:serve")


RENDERER = Renderer()
