"""The engine: many sequences, one device, one Step at a time. Not thread-safe; `EngineWorker` gives it a thread.

Knows token ids only, no text.
"""

import logging
import math
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from dataclasses import replace
from itertools import chain
from operator import attrgetter
from typing import Any

from nvium_core.engine.device.budget import Budget
from nvium_core.engine.device.calibration import assumed_costs, choose_path, choose_threads, measure_costs, own_costs
from nvium_core.engine.device.calibration_cache import calibration_file, read_calibration, write_calibration
from nvium_core.engine.device.memory import cache_size
from nvium_core.engine.device.runner import Runner
from nvium_core.engine.events import Completion, Event, FailureEvent, StepReport, best
from nvium_core.engine.failures import DeviceLost, error_of
from nvium_core.engine.limits import Limits, eos_token_ids
from nvium_core.engine.params import EngineConfig, SamplingParams, require
from nvium_core.engine.recorder import Recorder
from nvium_core.engine.rehearsal import rehearsed
from nvium_core.engine.schedule.costs import StepCosts
from nvium_core.engine.schedule.drafting import Drafting
from nvium_core.engine.schedule.exit_frequencies import ExitFrequencies
from nvium_core.engine.schedule.kv_cache import PagePool
from nvium_core.engine.schedule.policies import POLICIES, Policy
from nvium_core.engine.schedule.policies.sweep import Sweep
from nvium_core.engine.schedule.randomness import random_seed
from nvium_core.engine.schedule.scheduler import Scheduler
from nvium_core.engine.schedule.sequence import Sequence
from nvium_core.engine.schedule.speedup import PiggybackSpeedup
from nvium_core.engine.schedule.step import Step, StepResult
from nvium_core.model.config import NviumConfig
from nvium_core.model.nvium import NviumForCausalLM

logger = logging.getLogger(__name__)


class Engine:
    def __init__(
        self,
        model: NviumForCausalLM,
        config: EngineConfig | None = None,
        *,
        make_runner: Callable[..., Runner] = Runner,
    ) -> None:
        """`make_runner` is for tests and measurements; it is given what `Runner` takes."""
        self.config = config or EngineConfig()
        self.model_config = model.config
        self.context = context_of(self.config, model.config)
        self.cache_size = cache_size(self.config, model.config, self.context, like=model.lm_head.weight)
        num_pages, page_size = self.cache_size.num_pages, self.cache_size.page_size
        self.limits = Limits(self.context, num_pages * page_size, model.config.vocab_size, eos_token_ids(model))
        self.pool = PagePool(num_pages, page_size, keeps_pages=self.config.prefix_caching)
        policy = self._policy(assumed_costs(model.config))
        drafting = Drafting(assumed_costs(model.config), self.config.max_drafts, has_drafter=model.drafter is not None)
        self.scheduler = Scheduler(policy, self.pool, self.config, num_blocks=model.config.num_exits, drafting=drafting)
        self.runner = make_runner(
            model,
            num_pages=num_pages,
            page_size=page_size,
            max_sequences=self.config.max_sequences,
            is_deterministic=self.config.deterministic,
            instructions=self.config.instructions,
            threads=self.config.threads,
        )
        self.scheduler.grows_early = self.runner.launches_ahead
        self.speedup = PiggybackSpeedup(max_rows_per_step=self.config.max_rows_per_step)
        self._recorder = Recorder(self.scheduler, self.speedup, vocab_size=model.config.vocab_size)
        self._num_arrived = 0
        self.costs: StepCosts | None = None
        """As calibrated."""
        self._device_was_idle = True
        self.runner_seconds = 0.0
        """Of the last step()."""
        self.reports: list[StepReport] = []
        """Of the Steps in the last step()."""

    @property
    def end_token_ids(self) -> frozenset[int]:
        """The model's end-of-text."""
        return self.limits.end_token_ids

    def add(
        self,
        sequence_id: str,
        token_ids: Items[int],
        params: SamplingParams | None = None,
        *,
        tenant: str = "",
        priority: int = 0,
        cache_salt: str = "",
    ) -> None:
        """Queue a request. Raises `InvalidRequest`, naming the field, for one that can never be served.

        Each of its choices (`best_of`, or else `n` of them) becomes a sequence with events of its own. Tenants whose
        sequences wait take turns; of a tenant's own, the lowest `priority` goes first. Cached prefixes are shared by
        requests of the same `cache_salt`.
        """
        params = params or SamplingParams()
        self.check(token_ids, params)
        default = self.config.sampling or self.model_config.default_sampling
        if params.sampling is None and default != "exits":
            params = replace(params, sampling=default)
        require(sequence_id not in self._recorder.requests, "sequence_id", f"{sequence_id!r} is already running")
        seed = random_seed() if params.seed is None else params.seed
        placed = {"tenant": tenant, "priority": priority, "cache_salt": cache_salt}
        self._recorder.add(
            [
                self._sequence(sequence_id, token_ids, params, seed=seed, choice=choice, **placed)
                for choice in range(params.choice, params.choice + params.num_choices)
            ]
        )

    def check(self, token_ids: Items[int], params: SamplingParams) -> None:
        """Raise `InvalidRequest` if a request with these tokens and parameters can never be served."""
        self.limits.check(token_ids, params)

    def cancel(self, sequence_id: str, choice: int | None = None) -> None:
        """Drop a request, or one of its choices, at once; unknown and finished ones are ignored."""
        for sequence in list(self._recorder.requests.get(sequence_id, [])):
            if choice in (None, sequence.choice):
                self._recorder.end(sequence)

    @property
    def has_work(self) -> bool:
        return bool(self._recorder.requests)

    def step(self) -> list[Event]:
        """Schedule, run, record, report; no events if there is nothing to do.

        Raises `DeviceLost` when the device has failed: then nothing can run any more.
        """
        started = time.monotonic()
        self.reports = []
        step = self.scheduler.schedule()
        if step is None:
            return []
        scheduled = time.monotonic()
        results = self._run(step)
        self.runner_seconds = time.monotonic() - scheduled
        events = self._recorder.record(results)
        self._report(results, events, time.monotonic() - started)
        return events[0] if len(events) == 1 else list(chain.from_iterable(events))

    def generate(self, prompts: Iterable[Items[int]], params: SamplingParams | None = None) -> list[Completion]:
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

    def calibrate(self, *, max_seconds: float = math.inf, remembers: bool = False) -> StepCosts:
        """Measure what Steps cost here and schedule by it. For an engine without work.

        Takes a second or two for a small model; of a large one as much is measured as the seconds allow. With
        `remembers`, what was measured before in the same conditions is taken, and what is measured now is kept.
        """
        require(not self.has_work, "engine", "must be idle to be calibrated")
        self.runner.prepare(self.config.max_rows_per_step, self.config.max_sequences)
        file = calibration_file(self.runner, self.config) if remembers else None
        known = read_calibration(file, self.runner) if file else None
        costs = known or self._measured(Budget(max_seconds))
        if file and not known:
            write_calibration(file, costs, self.runner)
        self.speedup.costs = costs.with_own((0.0, 0.0))
        self.costs = costs.copy()
        self.scheduler.policy = self._policy(costs)
        self.scheduler.drafting = Drafting(
            costs,
            self.config.max_drafts,
            head_share=self.runner.backend.draft_share,
            has_drafter=self.runner.has_drafter,
        )
        return costs

    def _measured(self, budget: Budget) -> StepCosts:
        """The last fifth of the budget is for the engine's own costs, which are seen while it generates block by block;
        passes do not show a single Step's."""
        runner, pool, config, seats = self.runner, self.pool, self.model_config, self.config.max_sequences
        choose_threads(runner, pool, config, max_sequences=seats, budget=budget.share(0.2))
        choose_path(runner, pool, config, budget.share(0.4))
        costs = measure_costs(runner, pool, config, max_sequences=seats, budget=budget.share(0.6))
        self.scheduler.policy = Sweep()
        return costs.with_own(own_costs(rehearsed(self, budget)))

    def check_integrity(self) -> None:
        """Assert that nothing is leaked, owned twice or out of order."""
        self.scheduler.check_integrity()
        self._recorder.check_integrity()

    def check_idle(self) -> None:
        """Assert that an engine without work holds nothing: what `check_integrity` asks, at no cost."""
        assert not self.scheduler.running and not self.scheduler.waiting and not self._recorder.holds_back
        assert self.pool.num_free == self.pool.num_pages, "a page is leaked"

    def _policy(self, costs: StepCosts) -> Policy:
        return POLICIES[self.config.schedule].of(costs, ExitFrequencies.even(self.model_config.num_exits))

    def _sequence(
        self, sequence_id: str, token_ids: Items[int], params: SamplingParams, *, seed: int, choice: int, **placed: Any
    ) -> Sequence:
        sequence = Sequence(
            sequence_id,
            token_ids,
            params,
            seed=seed,
            choice=choice,
            num_blocks=self.scheduler.num_blocks,
            arrival=self._num_arrived,
            stop_token_ids=self.limits.stops(params),
            **placed,
        )
        sequence.finish_reason = None if params.max_tokens else "length"
        self._num_arrived += 1
        return sequence

    def _run(self, step: Step) -> list[StepResult]:
        """The Step, and those run with it. If it fails, each sequence runs alone, so that only the guilty one ends."""
        try:
            return self.runner.run(step)
        except DeviceLost:
            raise
        except Exception as error:
            if len(step.runs) == 1:
                logger.exception("a sequence failed and was ended")
                return [StepResult(step, errors={step.runs[0].sequence: error})]
            logger.warning("a step of %d sequences failed; running each alone", len(step.runs))
            return [merged(step, [result for run in step.runs for result in self._run(Step(step.block, [run]))])]

    def _report(self, results: list[StepResult], events: list[list[Event]], seconds: float) -> None:
        is_measured = self._device_was_idle and self.runner.has_waited
        self._device_was_idle = self.runner.has_waited
        is_pass = is_whole_pass(results, self.scheduler.num_blocks)
        are_timed = is_measured and not is_pass and None not in [result.seconds for result in results[1:]]
        for result, told, own in zip(results, events, shares(results, seconds), strict=True):
            step = result.step
            self.scheduler.policy.observe(
                step.block,
                num_rows=step.num_rows,
                seconds=own if are_timed else None,
                num_asked=result.num_asked,
                num_left=result.num_left,
                follows=result is not results[0],
            )
            self.reports.append(StepReport(step.block + 1, step.num_rows, len(step.runs), own, told))
        if is_measured and is_round(results, self.scheduler.num_blocks):
            step = results[-1].step
            self.scheduler.drafting.observe_seconds(step.num_rows, step.num_drafts, seconds, len(step.runs))
        self.speedup.end(seconds)
        if is_measured and is_pass:
            self.scheduler.policy.observe_pass(num_rows=results[0].step.num_rows, seconds=seconds)


def shares(results: list[StepResult], seconds: float) -> list[float]:
    """Of the time that Steps took together: the first has the rest if the others were timed; otherwise equal shares."""
    later = [result.seconds for result in results[1:]]
    known = [each for each in later if each is not None]
    return [seconds - sum(known), *known] if len(known) == len(later) else [seconds / len(results)] * len(results)


def is_whole_pass(results: list[StepResult], num_blocks: int) -> bool:
    """One row of each sequence passed every block."""
    num_runs = len(results[0].step.runs)
    return len(results) == num_blocks and [result.step.num_rows for result in results] == [num_runs] * num_blocks


def is_round(results: list[StepResult], num_blocks: int) -> bool:
    """The same rows passed every block, and all were verified."""
    num_verified = sum(map(len, results[-1].verified.values()))
    return num_verified > 0 and [result.step.num_rows for result in results] == [num_verified] * num_blocks


def merged(step: Step, alone: list[StepResult]) -> StepResult:
    """Of a Step whose sequences ran one by one."""
    result = StepResult(step)
    for each in alone:
        result.decisions |= each.decisions
        result.verified |= each.verified
        result.scores |= each.scores
        result.errors |= each.errors
    return result


def context_of(config: EngineConfig, model: NviumConfig) -> int:
    limit = model.max_position_embeddings
    context = config.context or limit
    require(1 < context <= limit, "context", f"must be between 2 and the model's {limit}, got {context}")
    return context
