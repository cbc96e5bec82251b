"""The engine: many sequences, one device, one Step at a time. It knows token ids only, no text.

Not thread-safe: `EngineWorker` runs it on its own thread.
"""

import secrets
import time
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Items
from itertools import count
from operator import attrgetter

from nvium_core.engine.config import EngineConfig
from nvium_core.engine.device.memory import cache_size
from nvium_core.engine.device.runner import MakeBackend, Runner, best_backend
from nvium_core.engine.errors import require
from nvium_core.engine.events import Completion, Event, FailureEvent, PromptEvent, StepReport, TokenEvent, best
from nvium_core.engine.limits import Limits, eos_token_ids
from nvium_core.engine.recorder import Recorder
from nvium_core.engine.sampling_params import SamplingParams
from nvium_core.engine.schedule.admission import Admission
from nvium_core.engine.schedule.kv_cache import PagePool
from nvium_core.engine.schedule.scheduler import Scheduler
from nvium_core.engine.schedule.sequence import Sequence
from nvium_core.model.nvium import Nvium
from nvium_core.model.plan import is_tied


class Engine:
    def __init__(
        self, model: Nvium, config: EngineConfig | None = None, *, make_backend: MakeBackend = best_backend
    ) -> None:
        """`make_backend` is for tests and measurements."""
        self.config = config or EngineConfig()
        limit = model.config.max_position_embeddings
        context = limit if self.config.context is None else self.config.context
        message = f"must be between 2 and {limit}, the model's context, got {context}"
        require(1 < context <= limit, "context", message)
        self.cache_size = size = cache_size(self.config, model.config, context, like=model.lm_head.weight)
        self.context = min(context, size.num_tokens)
        """Maximum length of a sequence, which must fit the cache."""
        sampling = self.config.sampling or model.config.default_sampling
        threshold = self.config.exit_threshold or model.config.exit_threshold
        vocab_size = model.config.vocab_size
        self.limits = Limits(self.context, vocab_size, eos_token_ids(model), sampling, threshold)
        self.pool = PagePool(
            size.num_pages,
            size.page_size,
            num_preferred=size.num_preferred,
            keeps_pages=self.config.prefix_caching,
        )
        bounds = self.config.bounds(model.device.type)
        self.admission = Admission(self.pool, bounds.sequences)
        self.runner = Runner(model, self.config, size, make_backend)
        self.scheduler = Scheduler(
            self.admission,
            self.config,
            num_blocks=model.config.num_exits,
            num_multi_steps=self.runner.backend.num_multi_steps,
            async_scheduling=self.runner.backend.async_scheduling,
            bounds=bounds,
            is_tied=is_tied(model.model.blocks),
        )
        self._recorder = Recorder(self.scheduler, vocab_size=vocab_size)
        self._arrivals = count()
        self.reports: list[StepReport] = []
        """Reports of the last `step`, one per block that ran."""

    def add(
        self,
        request_id: str,
        token_ids: Items[int],
        params: SamplingParams | None = None,
        *,
        tenant: str = "",
        cache_salt: str = "",
    ) -> None:
        """Queue a request. Raise `InvalidRequest` if it can never be served.

        Each of its choices becomes a sequence with its own events. Tenants with waiting sequences take turns. Only
        requests with the same `cache_salt` share cached prefixes.
        """
        params = params or SamplingParams()
        self.limits.check(token_ids, params)
        require(request_id not in self._recorder.requests, "request_id", f"{request_id!r} is already running")
        seed = secrets.randbits(63) if params.seed is None else params.seed
        draw = self.limits.draw(params)
        self._recorder.add(
            [
                Sequence(
                    request_id,
                    token_ids,
                    params,
                    seed=seed,
                    choice=choice,
                    num_blocks=self.scheduler.num_blocks,
                    arrival=next(self._arrivals),
                    stop_token_ids=self.limits.stops(params),
                    tenant=tenant,
                    cache_salt=cache_salt,
                    draw=draw,
                )
                for choice in params.choices
            ]
        )

    def warm_up(self) -> None:
        """Prepare the device, and generate two tokens. The engine must be idle."""
        self.runner.prepare()
        self.generate([[0]], SamplingParams(max_tokens=min(2, self.context - 1)))

    def cancel(self, request_id: str, choice: int | None = None) -> None:
        """End a request, or one of its choices, immediately. Unknown and finished requests are ignored."""
        for sequence in list(self._recorder.requests.get(request_id, [])):
            if choice in (None, sequence.choice):
                self._recorder.end(sequence)

    @property
    def has_work(self) -> bool:
        return bool(self._recorder.requests)

    def step(self) -> list[Event]:
        """Schedule, run, record, report. Return [] if nothing can run. Raise `DeviceLost` if the device has failed."""
        started = time.perf_counter()
        self.reports = []
        step = self.scheduler.schedule()
        if step is None:
            return self._recorder.settle(is_idle=True)
        result = self.runner.run(step)
        events = self._recorder.record(step, result.outcomes)
        self.reports = result.reports
        num_tokens = sum([len(outcome.emissions) for outcome in result.outcomes])
        self.scheduler.observe(step, num_tokens, time.perf_counter() - started)
        return events + self._recorder.settle(is_idle=False)

    def run(self) -> Iterator[TokenEvent | PromptEvent]:
        """Step until no work is left, and yield all events. Raise the error of a sequence that fails."""
        while self.has_work:
            for event in self.step():
                if isinstance(event, FailureEvent):
                    raise event.error
                yield event

    def generate(self, prompts: Iterable[Items[int]], params: SamplingParams | None = None) -> list[Completion]:
        """Return the best `n` completions of each prompt, in the order of the prompts. The engine must be idle."""
        params = params or SamplingParams()
        choices: dict[str, list[Completion]] = {}
        try:
            for number, prompt in enumerate(prompts):
                self.add(f"generate-{number}", prompt, params)
                choices[f"generate-{number}"] = [Completion() for _ in range(params.num_choices)]
            for event in self.run():
                choices[event.request_id][event.choice - params.choice].append(event)
        finally:
            for request_id in choices:
                self.cancel(request_id)
        scores = attrgetter("scores")
        return [chosen for completions in choices.values() for chosen in best(completions, params.n, scores)]

    def check_integrity(self) -> None:
        """Assert that pages and seats have the right owners, and that all staircases are monotone."""
        self.admission.check_integrity()
        self._recorder.check_integrity()

    def check_idle(self) -> None:
        """Assert that an engine without work has no sequences and no owned pages. Cheaper than `check_integrity`."""
        assert not self.admission.running and not self.admission.waiting and not self._recorder.holds_back
        assert self.pool.num_free == self.pool.num_pages, "a page is leaked"
