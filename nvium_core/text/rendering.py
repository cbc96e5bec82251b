"""Renders chat templates in a sandbox process with limited time and memory, because a template is untrusted code.

This file is also the program of that process: it reads conversations as lines of JSON on stdin and writes the rendered
texts as lines of JSON to stdout.
"""

import json
import os
import resource
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

Json = dict[str, Any]

MAX_SECONDS = 1  # CPU time for one conversation
MAX_BYTES = 256 * 2**20  # additional memory for rendering
MAX_ANSWER_BYTES = 20_000_000  # size of the rendered text as JSON
MAX_REASON_CHARACTERS = 200  # a template's error message is cut to this length in our message

NESTED = "cannot render messages or tools that are nested too deeply"


class RenderingError(Exception):
    """Rendering failed. The message continues a sentence that begins with "the model's chat template"."""


class Renderer:
    """A pool of sandbox processes. Threads that render at the same time use different processes."""

    def __init__(self) -> None:
        self._idle: list[subprocess.Popen[bytes]] = []
        os.register_at_fork(after_in_child=self._idle.clear)

    def render(self, **arguments: Any) -> str:
        """Call `rendered` in a sandbox process. Arguments must be JSON values. Raise `RenderingError` on failure."""
        try:
            line = json.dumps(arguments).encode() + b"\n"
        except RecursionError as error:
            raise RenderingError(NESTED) from error
        process = self._idle_process()
        answer = exchange(process, line)
        if not answer:
            raise RenderingError(f"exceeds {MAX_SECONDS} s, {MAX_BYTES >> 20} MB or the maximum length of text")
        self._idle.append(process)
        reply: Json = json.loads(answer)
        if "error" in reply:
            raise RenderingError(reply["error"])
        return str(reply["text"])

    def _idle_process(self) -> subprocess.Popen[bytes]:
        while self._idle:
            process = self._idle.pop()
            if process.poll() is None:
                return process
        return subprocess.Popen(  # noqa: S603 # this file
            [sys.executable, "-I", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C must not end the process while the server drains
        )


def exchange(process: subprocess.Popen[bytes], line: bytes) -> bytes:
    """Send a line and return the process's answer. The answer is empty if the process died."""
    assert process.stdin is not None and process.stdout is not None
    answer = b""
    with suppress(OSError):
        process.stdin.write(line)
        process.stdin.flush()
        answer = process.stdout.readline()
    if not answer:
        process.kill()
        with suppress(OSError):
            process.communicate()
    return answer


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


def limit_memory() -> None:
    with suppress(OSError, ValueError):  # macOS rejects the limit
        size = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + MAX_BYTES,) * 2)


def main() -> None:
    """Answer every line. If a line exceeds the time limit, SIGPROF ends the process. Other limits end it by `_exit`."""
    limit_memory()
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, MAX_SECONDS)
        try:
            answer = answered(line)
        except MemoryError:
            os._exit(1)
        if len(answer) > MAX_ANSWER_BYTES:
            os._exit(1)
        sys.stdout.buffer.write(answer + b"\n")
        sys.stdout.buffer.flush()
        signal.setitimer(signal.ITIMER_PROF, 0)


def answered(line: bytes) -> bytes:
    try:
        return json.dumps({"text": rendered(**json.loads(line))}).encode()
    except RecursionError:
        return json.dumps({"error": NESTED}).encode()
    except RenderingError as error:
        return json.dumps({"error": str(error)}).encode()


if __name__ == "__main__":
    main()
