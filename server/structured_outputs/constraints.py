"""Structured outputs: turns grammars into constraints on tokens.

Separate processes compile the grammars and compute the token masks. Independent of models, sequences and HTTP.
"""

import ctypes
import pickle
import threading
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import NamedTuple, TypeVar
from weakref import WeakSet

import structlog
from transformers import PreTrainedTokenizerFast

from nvium_core import Constraint, TooCostly
from nvium_core.text.detokenizer import TokenBytes
from nvium_core.text.sandbox import PATIENCE_SECONDS, Helper, HelperLost, HelperStuck
from server.errors import TOO_COSTLY, InvalidField
from server.structured_outputs.grammar_process import ANY_CORE, BEGIN, BROKEN, COMMAND, GOES_ON, OVER, REPLY, Compiled
from server.structured_outputs.grammars import Grammar

MAX_CACHED_GRAMMARS = 16  # number of compiled grammars that stay cached, each in its own process

TOKENS_APART = 32

Result = TypeVar("Result")

current_core: Callable[[], int] = getattr(ctypes.PyDLL(None), "sched_getcpu", lambda: ANY_CORE)

log = structlog.get_logger("nvium.server")


class RequestConstraint(NamedTuple):
    constraint: Constraint | None
    ignored: Sequence[str] = ()
    """Paths of schema keywords that are not enforced."""


class Constraints:
    def __init__(self, tokenizer: PreTrainedTokenizerFast, end_token_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._end_token_ids = sorted(end_token_ids)
        self.vocabulary = TokenBytes(tokenizer.backend_tokenizer)
        self._lock = threading.Lock()
        self._fork_server: Helper | None = None
        self._cached: dict[bytes, GrammarProcess] = {}

    def compile(self, field: str, grammar: Grammar) -> RequestConstraint:
        """Return at once if the grammar is cached, otherwise block for up to several seconds.

        Raise `InvalidField` for a grammar that is malformed, unsupported, unsatisfiable, too large or too costly, and
        `HelperStuck` if no process compiles it in time.
        """
        if not (self.vocabulary.is_byte_level or self.vocabulary.has_byte_fallback):
            raise InvalidField(field, "not supported: the model's tokens are not bytes")
        try:
            pickled = pickle.dumps(grammar)
        except RecursionError as error:
            raise InvalidField(field, "nested too deeply") from error
        try:
            compiled = self._with_process(pickled, GrammarProcess.compiled)
        except HelperStuck:
            log.warning("a grammar process did not answer in time and was killed", field=field)
            raise
        except HelperLost as error:
            log.warning("a grammar process ended: out of time, out of memory or a crash", field=field)
            raise InvalidField(field, "takes too much time or memory to compile", code=TOO_COSTLY) from error
        if compiled.error is not None:
            raise InvalidField(field, compiled.error)
        masks = MaskClient(lambda: self._with_process(pickled, lambda process: process.helper.fork()))
        ignored = [f"{field}.{place}" for place in compiled.ignored]
        return RequestConstraint(GrammarConstraint(masks), ignored)

    def _with_process(self, pickled: bytes, use: Callable[["GrammarProcess"], Result]) -> Result:
        """Call `use` with the process of a grammar, which may still compile it.

        If the process is lost, try once more with another one, unless compiling the grammar may be the cause.
        """
        process = self._grammar_process(pickled)
        try:
            return use(process)
        except HelperLost:
            with self._lock:
                if self._cached.get(pickled) is process:
                    del self._cached[pickled]
            is_compiling = use is GrammarProcess.compiled and process.helper.has_begun
            if is_compiling and not process.helper.was_stopped:
                raise
        return use(self._grammar_process(pickled))

    def _grammar_process(self, pickled: bytes) -> "GrammarProcess":
        with self._lock:
            process = self._cached.pop(pickled, None) or GrammarProcess(self._fork(), pickled)
            self._cached[pickled] = process
            if len(self._cached) > MAX_CACHED_GRAMMARS:
                self._cached.pop(next(iter(self._cached)))
        return process

    def _fork(self) -> Helper:
        if self._fork_server is not None:
            with suppress(HelperLost):
                return self._fork_server.fork()
        self._fork_server = Helper.spawn("server.structured_outputs.grammar_process:main")
        end_tokens = self._end_token_ids or self._tokenizer.eos_token_id
        self._fork_server.send(pickle.dumps((self._tokenizer.backend_tokenizer.to_str(), None, end_tokens)))
        return self._fork_server.fork()


class GrammarProcess:
    """A process that compiles one grammar, and then forks mask processes."""

    def __init__(self, helper: Helper, pickled: bytes) -> None:
        self.helper = helper
        helper.send(pickled)
        self._compiled: Compiled | None = None
        self._lock = threading.Lock()

    def compiled(self) -> Compiled:
        """Wait for the result. Raise `HelperLost` if the process ends before."""
        with self._lock:
            while self._compiled is None:
                if reply := self.helper.receive():
                    self._compiled = pickle.loads(reply)  # noqa: S301 # from our own process
            return self._compiled


class MaskClient:
    """The connection to a request's mask process.

    The mask process of a lone choice runs on the core of the engine's thread, which waits for it: waking another core
    takes 45 µs a mask. The engine does not wait for a late mask, so the process may then use any core for
    `TOKENS_APART` tokens.
    """

    clients = WeakSet["MaskClient"]()

    def __init__(self, start: Callable[[], Helper]) -> None:
        self.clients.add(self)
        self._start = start
        self._helper: Helper | None = None
        """None until the first reply is needed, which is when the request has a seat."""
        self._commands: list[bytes] = []
        """Commands that no process has begun with."""
        self._tokens_apart = 0
        self._num_awaited = Counter[int]()
        """Number of outstanding replies for each choice."""
        self._replies: dict[int, tuple[int, bytes]] = {}
        self._num_choices = 0

    def begin(self, origin: int = 0) -> int:
        """Start a choice and return its number. If it is not the first choice, copy the state of choice `origin`."""
        choice, self._num_choices = self._num_choices, self._num_choices + 1
        self.send(choice, BEGIN, origin)
        return choice

    def send(self, choice: int, token_id: int, origin: int = 0) -> None:
        """Request the mask after this token."""
        self._num_awaited[choice] += 1
        is_lone = len(self.clients) == 1 and self._num_choices <= 2  # a prototype and its fork
        core = current_core() if is_lone and not self._tokens_apart else ANY_CORE
        self._tokens_apart = max(0, self._tokens_apart - 1)
        command = COMMAND.pack(choice, token_id, origin, core)
        if not (self._helper and self._helper.has_begun):
            self._commands.append(command)
        if self._helper:
            with suppress(HelperLost):  # the next read raises
                self._helper.send(command)

    def reply(self, choice: int, seconds: float = PATIENCE_SECONDS) -> tuple[int, bytes] | None:
        """Return the choice's state and mask, or None after the timeout. Raise `TooCostly` if the process ended."""
        try:
            if self._helper is None:
                self._helper = self._start()
                for command in self._commands:
                    self._helper.send(command)
            while self._num_awaited[choice]:
                if (message := self._helper.receive(seconds)) is None:
                    self._tokens_apart = TOKENS_APART
                    return None
                number, state = REPLY.unpack_from(message)
                self._replies[number] = state, message[REPLY.size :]
                self._num_awaited[number] -= 1
        except HelperStuck:
            if self._helper is None or self._helper.has_begun or not self._helper.was_stopped:
                raise
            self._helper = None
            return self.reply(choice, seconds)
        except HelperLost as error:
            raise TooCostly("its process ran out of time or memory, or was killed") from error
        return self._replies[choice]


class GrammarConstraint:
    """The state of one choice's grammar. Raises `TooCostly` if the next mask is too expensive."""

    def __init__(self, masks: MaskClient, origin: int = 0) -> None:
        self._masks = masks
        self._choice = masks.begin(origin)

    def is_ready(self, seconds: float) -> bool:
        return self._masks.reply(self._choice, seconds) is not None

    @property
    def is_over(self) -> bool:
        return self._state()[0] == OVER

    def allowed(self) -> bytes:
        return self._state()[1]

    def advance(self, token_id: int) -> None:
        self._masks.send(self._choice, token_id)

    def fork(self) -> "GrammarConstraint":
        return GrammarConstraint(self._masks, self._choice)

    def _state(self) -> tuple[int, bytes]:
        reply = self._masks.reply(self._choice)
        assert reply is not None
        if reply[0] not in (GOES_ON, OVER):
            if reply[0] == BROKEN:
                raise RuntimeError("the grammar does not allow a token that was sampled")
            raise TooCostly("the grammar is too complex")
        return reply
