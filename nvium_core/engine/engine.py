"""The engine: many sequences, one device, one Step at a time. Not thread-safe; `EngineWorker` gives it a thread.

Knows token ids only, no text.
"""

import math
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from dataclasses import replace
from operator import attrgetter
from typing import Any

from nvium_core.engine.device.memory import cache_size
from nvium_core.engine.device.runner import Runner
from nvium_core.engine.events import Completion, Event, FailureEvent, StepReport, best
from nvium_core.engine.failures import error_of
from nvium_core.engine.limits import Limits, eos_token_ids
from nvium_core.engine.params import EngineConfig, SamplingParams, require
from nvium_core.engine.recorder import Recorder
from nvium_core.engine.schedule.kv_cache import PagePool
from nvium_core.engine.schedule.randomness import random_seed
from nvium_core.engine.schedule.scheduler import Scheduler
from nvium_core.engine.schedule.sequence import Sequence
from nvium_core.engine.schedule.step import Step, StepResult
from nvium_core.engine.warm_up import warm_up
from nvium_core.model.config import NviumConfig
from nvium_core.model.nvium import Nvium


class Engine:
    def __init__(
        self,
        model: Nvium,
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
        self.runner = make_runner(model, self.config, num_pages=num_pages, page_size=page_size)
        self.scheduler = Scheduler(
            self.pool,
            self.config,
            num_blocks=model.config.num_exits,
            tokens_ahead=self.runner.backend.tokens_ahead,
            bounds=self.config.row_bounds(model.device.type),
        )
        self._recorder = Recorder(self.scheduler, vocab_size=model.config.vocab_size)
        self._num_arrived = 0
        self.reports: list[StepReport] = []
        """Reports of the last step(), by block."""

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
        """Schedule, run, record, report; no events if there is nothing to do yet.

        Raises `DeviceLost` when the device has failed: then nothing can run any more.
        """
        started = time.perf_counter()
        self.reports = []
        step = self.scheduler.schedule()
        if step is None:
            return self._recorder.settle(is_idle=True)
        result = self.runner.run(step)
        events = self._recorder.record(step, result.outcomes)
        self._report(step, result, time.perf_counter() - started)
        return events + self._recorder.settle(is_idle=False)

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

    def warm_up(self, seconds: float = math.inf, *, remembers: bool = False) -> None:
        """Capture what is captured and let the schedules race for a moment. For an engine without work.

        With `remembers`, the race begins with what was measured before in the same conditions.
        """
        require(not self.has_work, "engine", "must be idle to be warmed up")
        self.runner.prepare()
        warm_up(self, seconds, remembers=remembers)

    def check_integrity(self) -> None:
        """Assert that nothing is leaked, owned twice or out of order."""
        self.scheduler.check_integrity()
        self._recorder.check_integrity()

    def check_idle(self) -> None:
        """Assert that an engine without work holds nothing: what `check_integrity` asks, at no cost."""
        assert not self.scheduler.running and not self.scheduler.waiting and not self._recorder.holds_back
        assert self.pool.num_free == self.pool.num_pages, "a page is leaked"

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

    def _report(self, step: Step, result: StepResult, seconds: float) -> None:
        num_tokens = sum([len(outcome.emissions) for outcome in result.outcomes])
        self.scheduler.observe(step, num_tokens, seconds)
        self.reports = [
            StepReport(block + 1, num_steps, num_rows, own) for block, num_steps, num_rows, own in result.reports
        ]


def context_of(config: EngineConfig, model: NviumConfig) -> int:
    limit = model.max_position_embeddings
    context = config.context or limit
    require(1 < context <= limit, "context", f"must be between 2 and the model's {limit}, got {context}")
    return context
