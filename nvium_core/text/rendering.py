"""Renders chat templates; runs in the helper processes of `Renderer`."""

import json
import os
from multiprocessing.connection import Connection
from typing import Any

from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from nvium_core.text.renderer import MAX_BYTES, MAX_SECONDS, NESTED, Json, RenderingError
from nvium_core.text.sandbox import limit_cpu_time, limit_memory

MAX_ANSWER_BYTES = 20_000_000  # size of the rendered text as JSON
MAX_REASON_CHARACTERS = 200  # a template's error message is cut to this length in our message


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
            answer = json.dumps({"text": rendered(**json.loads(message))}).encode()
        except RecursionError:
            answer = json.dumps({"error": NESTED}).encode()
        except RenderingError as error:
            answer = json.dumps({"error": str(error)}).encode()
        except MemoryError:
            os._exit(1)
        if len(answer) > MAX_ANSWER_BYTES:
            os._exit(1)
        pipe.send_bytes(answer)
        limit_cpu_time(0)
