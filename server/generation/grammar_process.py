"""Isolated processes that compile clients' grammars and compute their token masks.

On hostile input llguidance can crash, exhaust memory, or spend minutes on one mask that cannot be interrupted. So each
grammar runs in its own process. Each process forks the ones below it:

    keeper          has loaded the tokenizer
    └── grammar     has compiled one grammar, and is cached for later requests
        └── follower    computes the masks of one request's choices

A process ends when its pipe closes or when it exceeds its CPU time or memory. Imports neither PyTorch nor HTTP.
"""

import gc
import os
import resource
import signal
import struct
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from pathlib import Path
from typing import NamedTuple

from llguidance import LLMatcher, LLTokenizer

from server.generation.compiler import Compiled, Compiler

COMPILE_SECONDS = 2.5
"""CPU time for compiling. All times in this module are CPU time."""

FIRST_SECONDS = 0.5
"""Initial and maximum budget for a request's masks."""

MASK_SECONDS = 0.005
"""Added to the budget with each token."""

MEMORY_BYTES = 512 << 20
"""Address space on top of the keeper's."""

STACK_BYTES = 64 << 20
"""llguidance recurses along chains of references."""

COMMAND = struct.Struct("iii")
"""A choice, its next token, and, if the token is `BEGIN`, the choice whose state it copies."""

BEGIN = -1

REPLY = struct.Struct("iB")
"""A choice and its state, followed by its mask."""

GOES_ON, OVER, TOO_COSTLY, BROKEN = range(4)

NOT_ALLOWED = "doesn't satisfy the grammar"
"""Identifies llguidance's error for a disallowed token. Its only other error is an exceeded limit."""


class Greeting(NamedTuple):
    """A follower's first message."""

    error: str | None
    """Why the grammar is unusable."""
    ignored: list[str]
    """Paths of schema keywords that are not enforced."""
    begun: list[int]
    """The tokens of the answer that the grammar has already consumed."""


def main() -> None:
    """Run the keeper. `argv[1]` is the descriptor of its pipe, whose first message is the tokenizer."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_IGN)
    pipe = Connection(int(sys.argv[1]))
    with suppress(EOFError):
        compiler = Compiler(LLTokenizer(*pipe.recv()))
        limit_resources()
        gc.freeze()
        fork_for_each(pipe, lambda child: keep_grammar(child, compiler))


def limit_resources() -> None:
    os.nice(5)  # run behind the engine
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, hard = resource.getrlimit(resource.RLIMIT_STACK)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_STACK, (STACK_BYTES, hard))
    if (statm := Path("/proc/self/statm")).exists():
        num_bytes = int(statm.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (num_bytes + MEMORY_BYTES,) * 2)


def fork_for_each(pipe: Connection, work: Callable[[Connection], None]) -> None:
    """Fork a child for each pipe received through this pipe, until it closes."""
    with suppress(EOFError, OSError, RuntimeError):
        while True:
            child = Connection(recv_handle(pipe))
            if os.fork() == 0:
                try:
                    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # hides llguidance's panics
                    pipe.close()
                    work(child)
                finally:
                    os._exit(0)
            child.close()


def keep_grammar(pipe: Connection, compiler: Compiler) -> None:
    allow(COMPILE_SECONDS)
    compiled = compiler.compile(pipe.recv())
    allow(0)
    fork_for_each(pipe, lambda child: Follower(child, compiled).run())


def allow(seconds: float) -> None:
    """Let this process use this much more CPU time before SIGPROF kills it; 0 means no limit."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


class Follower:
    def __init__(self, pipe: Connection, compiled: Compiled) -> None:
        self._pipe = pipe
        self._compiled = compiled
        self._states: dict[int, LLMatcher] = {} if compiled.matcher is None else {0: compiled.matcher}
        self._seconds = FIRST_SECONDS

    def run(self) -> None:
        """Send a greeting, then reply to each token with the next mask."""
        beginnings = self._pipe.recv()
        allow(FIRST_SECONDS)
        self._pipe.send(Greeting(self._compiled.error, self._compiled.ignored, self._begun(beginnings)))
        allow(0)
        while self._states:
            command = COMMAND.unpack(self._pipe.recv_bytes())
            allow(self._seconds)
            started = time.process_time()
            state, mask = self._follow(*command)
            allow(0)
            self._seconds = min(FIRST_SECONDS, self._seconds - (time.process_time() - started) + MASK_SECONDS)
            self._seconds = max(self._seconds, MASK_SECONDS)
            self._pipe.send_bytes(REPLY.pack(command[0], state) + mask)

    def _begun(self, beginnings: list[list[int]]) -> list[int]:
        """Consume the first of these token sequences that the grammar can continue, and return it."""
        for token_ids in beginnings if self._states else ():
            matcher = self._states[0].deep_copy()
            if matcher.consume_tokens(token_ids) and not matcher.is_stopped():
                self._states[0] = matcher
                return token_ids
        return []

    def _follow(self, choice: int, token_id: int, origin: int) -> tuple[int, bytes]:
        if token_id == BEGIN and choice != origin:
            self._states[choice] = self._states[origin].deep_copy()
        matcher = self._states[choice]
        if token_id != BEGIN:
            matcher.consume_token(token_id)
        mask = b"" if matcher.is_stopped() else matcher.compute_bitmask()
        if matcher.is_error():
            return BROKEN if NOT_ALLOWED in matcher.get_error() else TOO_COSTLY, b""
        return OVER if matcher.is_stopped() else GOES_ON, mask
