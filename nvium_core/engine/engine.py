"""The engine: many sequences, one device, one Step at a time. Not thread-safe; `EngineWorker` gives it a thread.

Knows token ids only, no text.
"""

import logging
import math
import time
from collections.abc import Iterable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from typing import Literal

from nvium_core.engine.junction import Junction
from nvium_core.engine.kv_cache import PagePool
from nvium_core.engine.params import (
    DEFAULT_CACHE_TOKENS,
    ContextLengthExceeded,
    EngineConfig,
    InvalidRequest,
    SamplingParams,
    require,
)
from nvium_core.engine.policies import POLICIES
from nvium_core.engine.randomness import random_seed
from nvium_core.engine.runner import Runner
from nvium_core.engine.scheduler import Run, Scheduler, Step
from nvium_core.engine.sequence import Sequence
from nvium_core.errors import NviumError
from nvium_core.model.nvium import NviumForCausalLM

logger = logging.getLogger(__name__)

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """A token was spoken. `exit` counts from 1; `exit_probability` is p_k of the exit taken."""

    sequence_id: str
    token_id: int
    exit: int
    exit_probability: float
    finish_reason: FinishReason | None


@dataclass(frozen=True, slots=True)
class FailureEvent:
    """A sequence ended because running it failed; others are not affected."""

    sequence_id: str
    message: str


Event = TokenEvent | FailureEvent


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one Step did: the block (1-based), its rows, the time it took and what came of it."""

    block: int
    num_rows: int
    seconds: float
    events: list[Event]


@dataclass
class Completion:
    """All that one sequence spoke. `exits` count from 1."""

    token_ids: list[int] = field(default_factory=list)
    exits: list[int] = field(default_factory=list)
    exit_probabilities: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def append(self, event: TokenEvent) -> None:
        """Take the next token."""
        self.token_ids.append(event.token_id)
        self.exits.append(event.exit)
        self.exit_probabilities.append(event.exit_probability)
        self.finish_reason = event.finish_reason


class EngineError(NviumError, RuntimeError):
    """A sequence could not be run to its end."""


class Engine:
    def __init__(self, model: NviumForCausalLM, config: EngineConfig | None = None) -> None:
        self.config = config or EngineConfig()
        self.model_config = model.config
        self.context = self._context()
        self._stop_ids = eos_token_ids(model)
        num_pages = self._num_pages()
        pool = PagePool(num_pages, self.config.page_size)
        self.scheduler = Scheduler(
            POLICIES[self.config.schedule](),
            pool,
            num_blocks=model.config.num_exits,
            max_sequences=self.config.max_sequences,
            max_rows=self.config.max_rows_per_step,
        )
        self.runner = Runner(
            model, num_pages=num_pages, page_size=self.config.page_size, max_sequences=self.config.max_sequences
        )
        self._sequences: dict[str, Sequence] = {}
        self._num_arrived = 0
        self.last_report: StepReport | None = None

    def add(self, sequence_id: str, token_ids: Tokens[int], params: SamplingParams | None = None) -> None:
        """Take a request in. Raises `InvalidRequest`, naming the field, for one that can never be served."""
        params = params or SamplingParams()
        self.check(token_ids, params)
        require(sequence_id not in self._sequences, "sequence_id", f"{sequence_id!r} is already running")
        seed = random_seed() if params.seed is None else params.seed
        sequence = Sequence(
            sequence_id,
            token_ids,
            params,
            seed=seed,
            num_blocks=self.model_config.num_exits,
            arrival=self._num_arrived,
        )
        self._num_arrived += 1
        self._sequences[sequence_id] = sequence
        self.scheduler.add(sequence)

    def check(self, token_ids: Tokens[int], params: SamplingParams) -> None:
        """Raise `InvalidRequest` if a request with these tokens and parameters can never be served."""
        vocab_size = self.model_config.vocab_size
        require(len(token_ids) > 0, "prompt", "must hold at least one token")
        for token in (*token_ids, *params.stop_token_ids):
            if not 0 <= token < vocab_size:
                name = "prompt" if token in token_ids else "stop_token_ids"
                raise InvalidRequest(name, f"token id {token} is outside the vocabulary of {vocab_size}")
        if len(token_ids) + params.max_tokens > self.context:
            raise ContextLengthExceeded(len(token_ids), params.max_tokens, self.context)

    def cancel(self, sequence_id: str) -> None:
        """Drop a sequence at once; unknown and finished ids are ignored."""
        if sequence := self._sequences.pop(sequence_id, None):
            self.scheduler.remove(sequence)

    @property
    def has_work(self) -> bool:
        return bool(self._sequences)

    def step(self) -> list[Event]:
        """Schedule, run, record, report. Nothing to do gives no events."""
        step = self.scheduler.schedule()
        self.last_report = None
        if step is None:
            return []
        started = time.monotonic()
        outcomes = self._run(step)
        events = self._record(step, outcomes)
        self._report(step, time.monotonic() - started, events)
        return events

    def generate(self, prompts: Iterable[Tokens[int]], params: SamplingParams | None = None) -> list[Completion]:
        """Run prompts to their ends together, on an otherwise idle engine; completions in the order of the prompts."""
        completions: dict[str, Completion] = {}
        try:
            for number, prompt in enumerate(prompts):
                self.add(f"generate-{number}", prompt, params)
                completions[f"generate-{number}"] = Completion()
            while self.has_work:
                for event in self.step():
                    if isinstance(event, FailureEvent):
                        raise EngineError(event.message)
                    completions[event.sequence_id].append(event)
        finally:
            for sequence_id in completions:
                self.cancel(sequence_id)
        return list(completions.values())

    def check_integrity(self) -> None:
        """Assert that nothing is leaked, owned twice or out of order."""
        self.scheduler.check_integrity()
        held = {s.id for s in (*self.scheduler.waiting, *self.scheduler.running)}
        assert held == self._sequences.keys()

    def _run(self, step: Step) -> list[Junction | Exception | None]:
        """The Step's outcomes. If it fails, each sequence runs alone, so that only the guilty one ends."""
        try:
            return list(self.runner.run(step))
        except Exception as error:
            if len(step.runs) == 1:
                logger.exception("a sequence failed and was ended")
                return [error]
            logger.warning("a step of %d sequences failed; running each alone", len(step.runs))
            return [outcome for run in step.runs for outcome in self._run(Step(step.block, [run]))]

    def _record(self, step: Step, outcomes: list[Junction | Exception | None]) -> list[Event]:
        """Move the staircases on; tokens and endings become events."""
        events: list[Event] = []
        for run, outcome in zip(step.runs, outcomes, strict=True):
            if isinstance(outcome, Exception):
                events.append(self._fail(run.sequence, "running the model failed"))
                continue
            run.sequence.advance(step.block, run.rows)
            if outcome is not None:
                events += self._pass_junction(run, step.block, outcome)
        return events

    def _pass_junction(self, run: Run, block: int, junction: Junction) -> list[Event]:
        sequence = run.sequence
        if junction.token_id is None:
            sequence.log_reached += junction.log_continue
            return []
        if junction.token_id < 0:
            return [self._fail(sequence, "the model's output is not finite")]
        probability = math.exp(sequence.log_reached + junction.log_exit)
        sequence.append(junction.token_id)
        reason = self._finish_reason(sequence)
        if reason:
            self._end(sequence)
        return [TokenEvent(sequence.id, junction.token_id, block + 1, probability, reason)]

    def _finish_reason(self, sequence: Sequence) -> FinishReason | None:
        params, token = sequence.params, sequence.token_ids[-1]
        if token in params.stop_token_ids or (token in self._stop_ids and not params.ignore_eos):
            return "stop"
        return "length" if sequence.num_generated == params.max_tokens else None

    def _fail(self, sequence: Sequence, message: str) -> FailureEvent:
        self._end(sequence)
        return FailureEvent(sequence.id, message)

    def _end(self, sequence: Sequence) -> None:
        del self._sequences[sequence.id]
        self.scheduler.remove(sequence)

    def _report(self, step: Step, seconds: float, events: list[Event]) -> None:
        self.last_report = StepReport(step.block + 1, step.num_rows, seconds, events)

    def _context(self) -> int:
        limit = self.model_config.max_position_embeddings
        context = self.config.context or limit
        require(1 < context <= limit, "context", f"must be between 2 and the model's {limit}, got {context}")
        return context

    def _num_pages(self) -> int:
        """Pages for `cache_tokens` positions, and never fewer than one sequence of full context needs."""
        wanted = self.config.cache_tokens
        if wanted is None:
            wanted = max(self.context, min(self.config.max_sequences * self.context, DEFAULT_CACHE_TOKENS))
        require(wanted >= self.context, "cache_tokens", f"must hold one full context of {self.context}, got {wanted}")
        return -(-wanted // self.config.page_size)


def eos_token_ids(model: NviumForCausalLM) -> frozenset[int]:
    """The model's end-of-text tokens, as its generation configuration or else its configuration names them."""
    named = getattr(model.generation_config, "eos_token_id", None)
    named = model.config.eos_token_id if named is None else named
    if named is None:
        return frozenset()
    return frozenset([named] if isinstance(named, int) else named)
