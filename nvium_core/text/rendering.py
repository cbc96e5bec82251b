"""Renders chat templates in a helper process with limited time and memory, because a template is untrusted code."""

import json
import os
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from nvium_core.text.sandbox import Helper, HelperLost, HelperStuck, limit_cpu_time, limit_memory

Json = dict[str, Any]

MAX_SECONDS = 1  # CPU time for one conversation
MAX_BYTES = 256 * 2**20  # additional memory for rendering
MAX_ANSWER_BYTES = 20_000_000  # size of the rendered text as JSON
MAX_REASON_CHARACTERS = 200  # a template's error message is cut to this length in our message

NESTED = "cannot render messages or tools that are nested too deeply"


class RenderingError(Exception):
    """Rendering failed. The message continues a sentence that begins with "the model's chat template"."""


class Renderer:
    """A pool of helpers. Threads that render at the same time use different helpers."""

    def __init__(self) -> None:
        self._idle: list[Helper] = []
        os.register_at_fork(after_in_child=self._idle.clear)

    def prepare(self) -> None:
        """Start a helper, which takes a second, and do not wait for it."""
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
        """Ask a helper. If it ended before its first message, ask a new one."""
        helper = self._idle_helper()
        try:
            reply = helper.ask(message)
        except HelperLost as error:
            if helper.has_begun or isinstance(error, HelperStuck):
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
    return Helper.spawn(f"{__name__}:serve")


RENDERER = Renderer()


def rendered(template: str, messages: list[Json], **arguments: Any) -> str:
    """Render a conversation. Without messages, only compile the template. Raise `RenderingError` on failure."""
    conversation = [{name: value for name, value in message.items() if value is not None} for message in messages]
    try:
        texts = render_jinja_template([conversation] if conversation else [], chat_template=template, **arguments)[0]
    except (MemoryError, RecursionError):
        raise
    except Exception as error:  # a template may raise any exception
        failure = "rejects the messages" if conversation else "cannot be parsed"
        if isinstance(error, TemplateError) and error.message:  # other errors' messages may reveal code
            failure += f": {error.message[:MAX_REASON_CHARACTERS]}"
        raise RenderingError(failure) from error
    return "".join(texts)


def serve(pipe: Connection) -> None:
    """Answer every message. If a message exceeds a limit, end the process."""
    limit_memory(MAX_BYTES)
    while True:
        message = pipe.recv_bytes()
        limit_cpu_time(MAX_SECONDS)
        try:
            answer = answered(message)
        except MemoryError:
            os._exit(1)
        if len(answer) > MAX_ANSWER_BYTES:
            os._exit(1)
        pipe.send_bytes(answer)
        limit_cpu_time(0)


def answered(message: bytes) -> bytes:
    try:
        return json.dumps({"text": rendered(**json.loads(message))}).encode()
    except RecursionError:
        return json.dumps({"error": NESTED}).encode()
    except RenderingError as error:
        return json.dumps({"error": str(error)}).encode()
