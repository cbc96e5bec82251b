"""Isolated processes that compile clients' grammars and compute their token masks.

On hostile input llguidance can crash, exhaust memory, or spend minutes on one mask that cannot be interrupted. So each
grammar runs in its own process. Processes are forked in three levels:

    fork server             has loaded the tokenizer
    └── grammar process     has compiled one grammar; later requests reuse it
        └── mask process    computes the masks of one request's choices

A process ends when its pipe closes, or when it exceeds its limit of CPU time or memory.
Independent of PyTorch and HTTP.
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

from llguidance import LLMatcher, LLTokenizer

from server.generation.compiler import Compiled, Compiler

COMPILE_SECONDS = 2.5
"""Maximum CPU time for compiling one grammar. All times in this module are CPU time."""

MASK_BUDGET_SECONDS = 0.5
"""Budget of CPU time for the masks of one request: the initial budget, which is also the maximum."""

BUDGET_PER_TOKEN_SECONDS = 0.005
"""CPU time added to the budget with each token."""

MEMORY_BYTES = 512 << 20
"""Address space that a process may use in addition to the fork server's."""

STACK_BYTES = 64 << 20
"""Maximum size of the stack. It is large, because llguidance recurses along chains of references."""

COMMAND = struct.Struct("iiii")
"""A choice, its next token, another choice, and the core on which to compute the mask, or `ANY_CORE`.

If the token is `BEGIN`, copy the state of the other choice.
"""

BEGIN = -1

ANY_CORE = -1

REPLY = struct.Struct("iB")
"""A choice and its state. The choice's mask follows."""

CORES = os.sched_getaffinity(0) if sys.platform == "linux" else set[int]()

GOES_ON, OVER, TOO_COSTLY, BROKEN = range(4)

NOT_ALLOWED = "doesn't satisfy the grammar"
"""Part of llguidance's error message for a disallowed token. All other errors mean an exceeded limit."""


def main() -> None:
    """Run the fork server. `argv[1]` is the descriptor of its pipe, whose first message is the tokenizer."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_IGN)
    pipe = Connection(int(sys.argv[1]))
    with suppress(EOFError):
        compiler = Compiler(LLTokenizer(*pipe.recv()))
        limit_resources()
        gc.freeze()
        fork_for_each(pipe, lambda child: serve_grammar(child, compiler))


def limit_resources() -> None:
    os.nice(5)  # the engine has priority
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, hard = resource.getrlimit(resource.RLIMIT_STACK)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_STACK, (STACK_BYTES, hard))
    if (statm := Path("/proc/self/statm")).exists():
        num_bytes = int(statm.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (num_bytes + MEMORY_BYTES,) * 2)


def fork_for_each(pipe: Connection, work: Callable[[Connection], None]) -> None:
    """Receive pipes through `pipe` and fork a child for each of them. Return when `pipe` closes."""
    with suppress(EOFError, OSError, RuntimeError):
        while True:
            child = Connection(recv_handle(pipe))
            if os.fork() == 0:
                try:
                    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # hide llguidance's panics
                    pipe.close()
                    work(child)
                finally:
                    os._exit(0)
            child.close()


def serve_grammar(pipe: Connection, compiler: Compiler) -> None:
    limit_cpu_time(COMPILE_SECONDS)
    compiled = compiler.compile(pipe.recv())
    limit_cpu_time(0)
    fork_for_each(pipe, lambda child: MaskServer(child, compiled).run())


def limit_cpu_time(seconds: float) -> None:
    """Let SIGPROF kill this process after `seconds` more of CPU time. 0 removes the limit."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


class MaskServer:
    def __init__(self, pipe: Connection, compiled: Compiled) -> None:
        self._pipe = pipe
        self._compiled = compiled
        self._states: dict[int, LLMatcher] = {} if compiled.matcher is None else {0: compiled.matcher}
        self._seconds = MASK_BUDGET_SECONDS
        self._core = ANY_CORE

    def run(self) -> None:
        """Send the compilation's result and the accepted start of the answer. Then reply to each token with a mask."""
        beginnings = self._pipe.recv()
        limit_cpu_time(MASK_BUDGET_SECONDS)
        self._pipe.send((self._compiled._replace(matcher=None), self._begun(beginnings)))
        limit_cpu_time(0)
        while self._states:
            *command, core = COMMAND.unpack(self._pipe.recv_bytes())
            self._move_to(core)
            limit_cpu_time(self._seconds)
            started = time.process_time()
            state, mask = self._follow(*command)
            limit_cpu_time(0)
            unused = max(0.0, self._seconds - (time.process_time() - started))
            self._seconds = min(MASK_BUDGET_SECONDS, unused + BUDGET_PER_TOKEN_SECONDS)
            self._pipe.send_bytes(REPLY.pack(command[0], state) + mask)

    def _move_to(self, core: int) -> None:
        if core != self._core:
            self._core = core
            with suppress(OSError):  # the core may be forbidden by now
                os.sched_setaffinity(0, CORES if core == ANY_CORE else {core})

    def _begun(self, beginnings: list[list[int]]) -> list[int]:
        """Advance the grammar by the first token sequence that it accepts, and return that sequence."""
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
