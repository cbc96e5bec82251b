"""The engine: many sequences, one device, one Step at a time. Not thread-safe; `EngineWorker` gives it a thread.

Knows token ids only, no text.
"""

import logging
import math
import time
from collections import deque
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Tokens
from dataclasses import replace
from numbers import Integral
from operator import attrgetter

from nvium_core.engine.device.calibration import (
    REHEARSED_SEQUENCES,
    REHEARSED_TOKENS,
    assumed_costs,
    choose_path,
    measure_costs,
    own_costs,
)
from nvium_core.engine.device.junction import Junction
from nvium_core.engine.device.memory import cache_size
from nvium_core.engine.device.runner import Outcome, Ran, Runner
from nvium_core.engine.device.sampling import NO_TOKEN
from nvium_core.engine.events import (
    Completion,
    Event,
    FailureEvent,
    PromptEvent,
    Score,
    StepReport,
    TokenEvent,
    best,
)
from nvium_core.engine.failures import error_of
from nvium_core.engine.params import ContextLengthExceeded, EngineConfig, InvalidRequest, SamplingParams, require
from nvium_core.engine.schedule.costs import StepCosts
from nvium_core.engine.schedule.exit_frequencies import ExitFrequencies
from nvium_core.engine.schedule.kv_cache import PagePool
from nvium_core.engine.schedule.policies import POLICIES, Optimal, Policy
from nvium_core.engine.schedule.randomness import random_seed
from nvium_core.engine.schedule.scheduler import Run, Scheduler, Step
from nvium_core.engine.schedule.sequence import FinishReason, Sequence
from nvium_core.engine.schedule.speedup import PiggybackSpeedup
from nvium_core.model.nvium import NviumForCausalLM

CONSTRAINT_LIMIT = "the request's constraint is too complex to be followed further"

logger = logging.getLogger(__name__)


class Engine:
    def __init__(self, model: NviumForCausalLM, config: EngineConfig | None = None) -> None:
        self.config = config or EngineConfig()
        self.model_config = model.config
        self._vocab_size = model.config.vocab_size
        self.context = self._context()
        self.cache_size = cache_size(self.config, model.config, self.context, like=model.lm_head.weight)
        self.end_token_ids = eos_token_ids(model)
        """The model's end-of-text."""
        self.pool = PagePool(
            self.cache_size.num_pages, self.cache_size.page_size, keeps_pages=self.config.prefix_caching
        )
        policy = self._policy(assumed_costs(model.config))
        self.scheduler = Scheduler(policy, self.pool, self.config, num_blocks=model.config.num_exits)
        self.runner = Runner(
            model,
            num_pages=self.pool.num_pages,
            page_size=self.pool.page_size,
            max_sequences=self.config.max_sequences,
            is_deterministic=self.config.deterministic,
        )
        self._requests: dict[str, list[Sequence]] = {}
        """Each request's living choices."""
        self._untold: dict[Sequence, deque[TokenEvent]] = {}
        """Tokens that were spoken and wait for their scores."""
        self._num_arrived = 0
        self.speedup = PiggybackSpeedup(max_rows_per_step=self.config.max_rows_per_step)
        self.costs: StepCosts | None = None
        """As they were when it was calibrated."""
        self._runner_seconds = 0.0
        """Of the last `step`."""
        self.reports: list[StepReport] = []
        """Of the Steps that the last `step` took."""

    def add(
        self, sequence_id: str, token_ids: Tokens[int], params: SamplingParams | None = None, *, tenant: str = ""
    ) -> None:
        """Take a request in. Raises `InvalidRequest`, naming the field, for one that can never be served.

        Each of its choices (`best_of`, or else `n` of them) becomes a sequence and tells events of its own. Tenants
        whose sequences wait take turns.
        """
        params = params or SamplingParams()
        self.check(token_ids, params)
        require(sequence_id not in self._requests, "sequence_id", f"{sequence_id!r} is already running")
        seed = random_seed() if params.seed is None else params.seed
        choices = range(params.choice, params.choice + params.num_choices)
        sequences = [
            self._sequence(sequence_id, token_ids, params, seed=seed, choice=choice, tenant=tenant)
            for choice in choices
        ]
        self._requests[sequence_id] = sequences
        for sequence in sequences:
            sequence.siblings = sequences
            self.scheduler.add(sequence)

    def check(self, token_ids: Tokens[int], params: SamplingParams) -> None:
        """Raise `InvalidRequest` if a request with these tokens and parameters can never be served."""
        require(len(token_ids) > 0, "prompt", "must hold at least one token")
        num_positions = len(token_ids) + params.max_tokens
        if num_positions > self.context:
            raise ContextLengthExceeded(len(token_ids), params.max_tokens, self.context)
        self._check_vocabulary("prompt", token_ids)
        self._check_vocabulary("stop_token_ids", params.stop_token_ids)
        self._check_vocabulary("logit_bias", params.logit_bias)
        capacity = self.pool.num_pages * self.pool.page_size
        message = f"{num_positions} tokens are asked for in all, and the cache holds {capacity}"
        require(num_positions <= capacity, "max_tokens" if len(token_ids) < capacity else "prompt", message)
        can_speak = params.min_tokens == 0 or len(self._stops(params)) < self._vocab_size
        require(can_speak, "min_tokens", "forbids every token, since all of them are stop tokens")
        is_something = params.max_tokens > 0 or len(token_ids) > 1
        require(is_something, "max_tokens", "must be at least 1: a prompt of one token has nothing to score")

    def cancel(self, sequence_id: str, choice: int | None = None) -> None:
        """Drop a request, or one of its choices, at once; unknown and finished ones are ignored."""
        for sequence in list(self._requests.get(sequence_id, [])):
            if choice in (None, sequence.choice):
                self._end(sequence)

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def step(self) -> list[Event]:
        """Schedule, run, record, report. Nothing to do gives no events."""
        started = time.monotonic()
        self.reports = []
        step = self.scheduler.schedule()
        if step is None:
            return []
        scheduled = time.monotonic()
        all_ran = self._run(step)
        self._runner_seconds = time.monotonic() - scheduled
        told = [self._record(ran) for ran in all_ran]
        self._report(all_ran, told, time.monotonic() - started)
        return [event for events in told for event in events]

    def generate(self, prompts: Iterable[Tokens[int]], params: SamplingParams | None = None) -> list[Completion]:
        """Run prompts to their ends together, on an otherwise idle engine.

        The best `n` completions of the first prompt, then those of the second, and so on.
        """
        params = params or SamplingParams()
        choices: dict[str, list[Completion]] = {}
        try:
            for number, prompt in enumerate(prompts):
                self.add(f"generate-{number}", prompt, params)
                choices[f"generate-{number}"] = [Completion() for _ in range(params.num_choices)]
            while self.has_work:
                for event in self.step():
                    if isinstance(event, FailureEvent):
                        raise error_of(event)
                    choices[event.sequence_id][event.choice - params.choice].append(event)
        finally:
            for sequence_id in choices:
                self.cancel(sequence_id)
        rank = attrgetter("mean_logprob")
        return [chosen for completions in choices.values() for chosen in best(completions, params.n, rank)]

    def calibrate(self) -> StepCosts:
        """Measure what Steps cost here, and schedule by it. For an engine without work; takes a second or two."""
        require(not self.has_work, "engine", "must be idle to be calibrated")
        choose_path(self.runner, self.pool, self.model_config)
        costs = measure_costs(self.runner, self.pool, self.model_config, max_sequences=self.config.max_sequences)
        self.scheduler.policy = self._policy(costs.copy())
        whole_costs = costs.with_own(own_costs(self._rehearsed()))
        self.speedup.costs = costs
        self.costs = whole_costs.copy()
        self.scheduler.policy = self._policy(whole_costs)
        return whole_costs

    def check_integrity(self) -> None:
        """Assert that nothing is leaked, owned twice or out of order."""
        self.scheduler.check_integrity()
        held = {*self.scheduler.waiting, *self.scheduler.running}
        assert held == {sequence for choices in self._requests.values() for sequence in choices}
        assert self._untold.keys() <= held
        assert all(self._requests.values())

    def check_idle(self) -> None:
        """Assert that an engine without work holds nothing: what `check_integrity` asks, at no cost."""
        assert not self.scheduler.running and not self.scheduler.waiting and not self._untold
        assert self.pool.num_free == self.pool.num_pages, "a page is leaked"

    def _rehearsed(self) -> Iterator[tuple[int, float]]:
        """Runs of Steps of several sequences, and the seconds they took beside the runner."""
        most = min(self.context, self.pool.num_pages * self.pool.page_size) - 1
        for number in REHEARSED_SEQUENCES:
            for seed in range(number if number <= self.config.max_sequences else 0):
                params = SamplingParams(max_tokens=min(REHEARSED_TOKENS, most), seed=seed, ignore_eos=True)
                self.add(f"rehearsal-{seed}", [0], params)
            while self.has_work:
                started = time.monotonic()
                self.step()
                taken = time.monotonic() - started
                if len(self.reports) == 1:
                    yield self.reports[0].num_sequences, taken - self._runner_seconds

    def _policy(self, costs: StepCosts) -> Policy:
        if self.config.schedule == "optimal":
            return Optimal(costs, ExitFrequencies.even(self.model_config.num_exits))
        return POLICIES[self.config.schedule]()

    def _sequence(
        self, sequence_id: str, token_ids: Tokens[int], params: SamplingParams, *, seed: int, choice: int, tenant: str
    ) -> Sequence:
        sequence = Sequence(
            sequence_id,
            token_ids,
            params,
            seed=seed,
            choice=choice,
            num_blocks=self.scheduler.num_blocks,
            arrival=self._num_arrived,
            stop_token_ids=self._stops(params),
            tenant=tenant,
        )
        sequence.finish_reason = None if params.max_tokens else "length"
        self._num_arrived += 1
        return sequence

    def _stops(self, params: SamplingParams) -> frozenset[int]:
        """All tokens that end such a request."""
        return frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.end_token_ids)

    def _check_vocabulary(self, name: str, token_ids: Iterable[int]) -> None:
        for token in token_ids:
            if not (is_whole(token) and 0 <= token < self._vocab_size):
                raise InvalidRequest(name, f"token id {token!r} is outside the vocabulary of {self._vocab_size}")

    def _run(self, step: Step) -> list[Ran]:
        """The Step, and those run with it. If it fails, each sequence runs alone, so that only the guilty one ends."""
        try:
            return self.runner.run(step)
        except Exception as error:
            if len(step.runs) == 1:
                logger.exception("a sequence failed and was ended")
                return [Ran(step, [error])]
            logger.warning("a step of %d sequences failed; running each alone", len(step.runs))
            alone = [self._run(Step(step.block, [run])) for run in step.runs]
            return [Ran(step, [outcome for [ran] in alone for outcome in ran.outcomes])]

    def _record(self, ran: Ran) -> list[Event]:
        """Move the staircases on; tokens, scores and endings become events."""
        step = ran.step
        if step.runs[0].sequence.seat is None:  # its last token came in a Step before, run with this one
            return []
        self.speedup.begin(step, self.scheduler.running)
        outcomes = zip(step.runs, ran.outcomes, strict=True)
        return [event for run, outcome in outcomes for event in self._record_run(step.block, run, outcome)]

    def _record_run(self, block: int, run: Run, outcome: Outcome | Exception) -> list[Event]:
        if isinstance(outcome, Exception):
            return [self._fail(run.sequence, "running the model failed")]
        run.sequence.advance(block, run.rows)
        if outcome.junction is not None and outcome.junction.token_id == NO_TOKEN:
            return [self._fail_to_speak(run.sequence)]
        if block == self.scheduler.num_blocks - 1:
            self.pool.publish(run.sequence, since=run.rows.start)
        events = [] if outcome.junction is None else self._pass_junction(run.sequence, block, outcome.junction)
        if outcome.scores:
            events += self._tell(run.sequence, outcome.scores)
        if run.sequence.finish_reason is not None and self._is_over(run.sequence):
            self._end(run.sequence)
        return events

    def _is_over(self, sequence: Sequence) -> bool:
        """It has spoken its last: neither scores nor the prompt that others wait for are due."""
        return not sequence.owes_scores and not self.scheduler.prefills_for_others(sequence)

    def _pass_junction(self, sequence: Sequence, block: int, junction: Junction) -> list[Event]:
        """Go on, or speak; what is spoken is told at once unless its score is asked for."""
        if junction.token_id is None:
            sequence.log_reached += junction.log_continue
            return []
        probability = math.exp(sequence.log_reached + junction.log_exit)
        sequence.append(junction.token_id)
        sequence.finish_reason = finish_reason(sequence)
        event = TokenEvent(
            sequence.id,
            junction.token_id,
            block + 1,
            probability,
            sequence.finish_reason,
            sequence.choice,
            is_stop=junction.token_id in sequence.stop_token_ids,
        )
        if sequence.needs_logprobs:
            self._untold.setdefault(sequence, deque()).append(event)
            return []
        return [event]

    def _tell(self, sequence: Sequence, scores: Tokens[Score]) -> list[Event]:
        """Deliver what has waited for these scores."""
        num_of_prompt = max(0, sequence.num_prompt_tokens - 1 - sequence.num_scored)
        of_prompt, of_tokens = scores[:num_of_prompt], scores[num_of_prompt:]
        sequence.num_scored += len(scores)
        events: list[Event] = []
        if of_prompt:
            reason = sequence.finish_reason if sequence.params.max_tokens == 0 and not sequence.owes_scores else None
            events.append(PromptEvent(sequence.id, tuple(of_prompt), reason, sequence.choice))
        events += [replace(self._untold[sequence].popleft(), score=score) for score in of_tokens]
        return events

    def _fail(self, sequence: Sequence, message: str) -> FailureEvent:
        """End it alone. Its pages may be what is wrong, so nobody may find them."""
        self.pool.forget(sequence)
        self._end(sequence)
        return FailureEvent(sequence.id, message, sequence.choice)

    def _fail_to_speak(self, sequence: Sequence) -> FailureEvent:
        """End one that could draw no token: nothing is allowed, or else the model is broken."""
        if sequence.constraint is None or sequence.constraint.allows_any(self._vocab_size):
            return self._fail(sequence, "the model's output is not finite")
        self._end(sequence)
        if sequence.constraint.is_too_costly:
            return FailureEvent(sequence.id, CONSTRAINT_LIMIT, sequence.choice, "constraint_limit")
        reason = "failed" if sequence.constraint.has_failed else "allows no token of the model"
        return FailureEvent(sequence.id, f"the request's constraint {reason}", sequence.choice)

    def _end(self, sequence: Sequence) -> None:
        if sequence.seat is not None:
            self.speedup.drop(sequence, self.scheduler.running)
        self.scheduler.remove(sequence)
        self._untold.pop(sequence, None)
        if not self._requests[sequence.id]:
            del self._requests[sequence.id]

    def _report(self, all_ran: list[Ran], told: list[list[Event]], seconds: float) -> None:
        """Of the time that it all took, the first Step has what the others did not need."""
        later_seconds = [ran.seconds or 0.0 for ran in all_ran[1:]]
        for ran, events, own in zip(all_ran, told, [seconds - sum(later_seconds), *later_seconds], strict=True):
            junctions = [outcome.junction for outcome in ran.outcomes if isinstance(outcome, Outcome)]
            asked = [junction for junction in junctions if junction is not None]
            num_left = sum(junction.token_id is not None for junction in asked)
            step = ran.step
            self.scheduler.policy.observe(
                step.block,
                num_rows=step.num_rows,
                seconds=own,
                num_asked=len(asked),
                num_left=num_left,
                follows=ran is not all_ran[0],
            )
            self.speedup.end(own)
            self.reports.append(StepReport(step.block + 1, step.num_rows, len(step.runs), own, events))

    def _context(self) -> int:
        limit = self.model_config.max_position_embeddings
        context = self.config.context or limit
        require(1 < context <= limit, "context", f"must be between 2 and the model's {limit}, got {context}")
        return context


def is_whole(token_id: object) -> bool:
    """An integer of any kind, NumPy's among them; `int` is named because it is found much faster."""
    return isinstance(token_id, (int, Integral))


def finish_reason(sequence: Sequence) -> FinishReason | None:
    """Why the token just spoken is the last one, if it is."""
    is_satisfied = sequence.constraint is not None and sequence.constraint.is_over
    if is_satisfied or sequence.token_ids[-1] in sequence.stop_token_ids:
        return "stop"
    return "length" if sequence.num_generated == sequence.params.max_tokens else None


def eos_token_ids(model: NviumForCausalLM) -> frozenset[int]:
    """The model's end-of-text tokens, as its generation configuration or else its configuration names them."""
    named = getattr(model.generation_config, "eos_token_id", None)
    named = model.config.eos_token_id if named is None else named
    if named is None:
        return frozenset()
    return frozenset([named] if isinstance(named, int) else named)
