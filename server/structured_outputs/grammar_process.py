"""Isolated processes that compile clients' grammars and compute their token masks.

On hostile input llguidance can crash, exhaust memory, or spend minutes on one mask that cannot be interrupted. So each
grammar runs in its own process. Processes are forked in three levels:

    fork server             has loaded the tokenizer
    └── grammar process     has compiled one grammar; later requests reuse it
        └── mask process    computes the masks of one running request's choices

Independent of PyTorch and HTTP.
"""

import gc
import os
import pickle
import resource
import struct
import sys
import time
from contextlib import suppress
from multiprocessing.connection import Connection

from llguidance import LLMatcher, LLTokenizer

from nvium_core.text.sandbox import limit_cpu_time, limit_memory, serve_forks
from server.structured_outputs.compiler import Compiler

COMPILE_SECONDS = 2.5
"""Maximum CPU time for compiling one grammar. All times in this module are CPU time."""

MASK_BUDGET_SECONDS = 0.5
"""Budget of CPU time for the masks of one request: the initial budget, which is also the maximum."""

BUDGET_PER_TOKEN_SECONDS = 0.005  # CPU time added to the budget with each token
MEMORY_BYTES = 512 << 20  # address space that a process may use in addition to the fork server's

STACK_BYTES = 64 << 20
"""Maximum size of the stack. It is large, because llguidance recurses along chains of references."""

COMMAND = struct.Struct("iiii")
"""A choice, its next token, another choice, and the core on which to compute the mask, or `ANY_CORE`.

If the token is `BEGIN`, copy the state of the other choice.
"""

BEGIN = -1

ANY_CORE = -1

REPLY = struct.Struct("iB")  # a choice and its state; the choice's mask follows

CORES = os.sched_getaffinity(0) if sys.platform == "linux" else set[int]()

GOES_ON, OVER, TOO_COSTLY, BROKEN = range(4)

NOT_ALLOWED = "doesn't satisfy the grammar"
"""Part of llguidance's error message for a disallowed token. All other errors mean an exceeded limit."""


def main(pipe: Connection) -> None:
    """Run the fork server. The first message is the tokenizer."""
    compiler = Compiler(LLTokenizer(*pickle.loads(pipe.recv_bytes())))  # noqa: S301 # from the server
    os.nice(5)  # the engine has priority
    _, hard = resource.getrlimit(resource.RLIMIT_STACK)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_STACK, (STACK_BYTES, hard))
    limit_memory(MEMORY_BYTES)
    gc.freeze()
    serve_forks(pipe, lambda forked: serve_grammar(forked, compiler))


def serve_grammar(pipe: Connection, compiler: Compiler) -> None:
    """Compile a grammar and send the result. Then fork a mask process for each request."""
    grammar = pickle.loads(pipe.recv_bytes())  # noqa: S301 # from the server
    limit_cpu_time(COMPILE_SECONDS)
    compiled = compiler.compile(grammar)
    limit_cpu_time(0)
    pipe.send_bytes(pickle.dumps(compiled._replace(matcher=None)))
    if matcher := compiled.matcher:
        serve_forks(pipe, lambda forked: MaskServer(forked, matcher).run())


class MaskServer:
    def __init__(self, pipe: Connection, matcher: LLMatcher) -> None:
        self._pipe = pipe
        self._states = {0: matcher}
        self._seconds = MASK_BUDGET_SECONDS
        self._core = ANY_CORE

    def run(self) -> None:
        while True:
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
