"""Renders chat templates. A template is somebody else's program, so it runs in a process with bounded time and memory.

This file is also the program of that process: a line of JSON on standard input has a conversation, a line of JSON on
standard output the text.
"""

import json
import os
import resource
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

Json = dict[str, Any]

MAX_SECONDS = 1
"""Processor time for one conversation."""

MAX_BYTES = 256 * 2**20
"""Memory beyond what the process needs to start."""

MAX_ANSWER_BYTES = 20_000_000
"""Longest text, as JSON."""

MAX_REASON_CHARACTERS = 200
"""Longest part of a template's error message that is reported."""

NESTED = "is given messages or tools that are nested too deeply"


class RenderingError(Exception):
    """The message says what the template does."""


class Renderer:
    """A pool of processes, started on demand: one for each thread that renders at the same time."""

    def __init__(self) -> None:
        self._idle: list[subprocess.Popen[bytes]] = []
        os.register_at_fork(after_in_child=self._idle.clear)

    def render(self, **asked: Any) -> str:
        """What `rendered` returns for these arguments, JSON all of them. Raises `RenderingError`."""
        try:
            line = json.dumps(asked).encode() + b"\n"
        except RecursionError as error:
            raise RenderingError(NESTED) from error
        process = self._taken()
        answer = replied(process, line)
        if not answer:
            raise RenderingError(f"takes more than {MAX_SECONDS} s or {MAX_BYTES >> 20} MB, or writes too long a text")
        self._idle.append(process)
        reply: Json = json.loads(answer)
        if "error" in reply:
            raise RenderingError(reply["error"])
        return str(reply["text"])

    def _taken(self) -> subprocess.Popen[bytes]:
        while self._idle:
            process = self._idle.pop()
            if process.poll() is None:
                return process
        return subprocess.Popen(  # noqa: S603 # this file
            [sys.executable, "-I", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the server, which may still have chats to answer
        )


def replied(process: subprocess.Popen[bytes], line: bytes) -> bytes:
    """The process's answer, empty if it died."""
    stdin, stdout = pipes(process)
    answer = b""
    with suppress(OSError):
        stdin.write(line)
        stdin.flush()
        answer = stdout.readline()
    if not answer:
        process.kill()
        with suppress(OSError):
            process.communicate()
    return answer


RENDERER = Renderer()


def pipes(process: subprocess.Popen[bytes]) -> tuple[IO[bytes], IO[bytes]]:
    assert process.stdin is not None and process.stdout is not None
    return process.stdin, process.stdout


def rendered(template: str, messages: list[Json], **asked: Any) -> str:
    """A conversation as transformers renders it; without messages, only compile. Raises `RenderingError`."""
    said = [{name: value for name, value in message.items() if value is not None} for message in messages]
    try:
        texts = render_jinja_template([said] if said else [], chat_template=template, **asked)[0]
    except (MemoryError, RecursionError):
        raise
    except Exception as error:  # a template may do anything with what it is given
        raise RenderingError(f"refuses them{reason(error)}" if said else f"cannot be read{reason(error)}") from error
    return "".join(texts)


def reason(error: Exception) -> str:
    """A template's error message, without details of code."""
    if not isinstance(error, TemplateError) or not error.message:
        return ""
    return f": {error.message[:MAX_REASON_CHARACTERS]}"


def bound_memory() -> None:
    with suppress(OSError, ValueError):  # macOS knows the limit and refuses it
        size = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + MAX_BYTES,) * 2)


def main() -> None:
    """Answer every line. The kernel ends the process at the limit of time; it ends itself without memory."""
    bound_memory()
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
