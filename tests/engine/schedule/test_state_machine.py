"""Random requests, cancellations and faults: nothing leaks, and no other request's output changes."""

from dataclasses import replace
from functools import partial

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nvium_core import Completion, EngineConfig, FailureEvent, NviumForCausalLM, SamplingParams
from nvium_core.engine.device.paged_cache import PagedCache
from nvium_core.engine.device.runner import MakeBackend, best_backend
from nvium_core.engine.events import Event
from nvium_core.engine.schedule.sequence import Sequence
from nvium_core.engine.schedule.step import Step, StepResult
from tests.engine.automaton import Automaton, Rule
from tests.engine.device.graphs.engines import PlainGraphs
from tests.engine.driving import Key, WrappedBackend, alone, engine_on
from tests.random_models import random_model

CONTEXT = 24
MODEL = random_model([1, 2, 4], seed=2, vocab_size=11, width=8, num_heads=2, num_key_heads=1, context=CONTEXT)
PREFIXES = [[], [1, 2, 3, 4, 5], [1, 2, 3, 4, 9, 9, 9]]

tails = st.lists(st.integers(1, 10), min_size=1, max_size=3)
configs = st.builds(
    EngineConfig,
    schedule=st.sampled_from(["race", "sweep", "whole"]),
    max_sequences=st.just(3),
    max_rows_per_step=st.sampled_from([3, 7, 64]),
    chunk_rows=st.sampled_from([2, 5]),
    max_wait_steps=st.sampled_from([1, 4, 64]),
    max_drafts=st.sampled_from([None, 2, 5]),
    page_size=st.integers(2, 4),
    cache_tokens=st.sampled_from([CONTEXT, CONTEXT, 3 * CONTEXT // 2]),
)

wishes = st.builds(
    SamplingParams,
    max_tokens=st.sampled_from([1, 3, 14, 14]),
    sampling=st.sampled_from([None, None, "original"]),
    temperature=st.sampled_from([0.0, 1.0, 1.0]),
    seed=st.integers(0, 3),
    n=st.sampled_from([1, 1, 2, 3]),
    logprobs=st.sampled_from([None, None, 0, 2]),
    constraint=st.sampled_from([None, None, Automaton(Rule(seed=1, vocab_size=11, length=9))]),
    ignore_eos=st.sampled_from([True, True, False]),
)


def key_of(each: Sequence | Event) -> Key:
    return each.request_id, each.choice


class FaultyBackend(WrappedBackend):
    """Fails Steps with the victim, or one Step of several sequences, before or after the forward pass."""

    victim: Key | None = None
    fails_once = False
    is_late = False
    guilty: set[Key] = set()
    """Sequences that failed alone: only these may report a failure."""

    def run(self, step: Step, max_rows: int) -> StepResult:
        if not self.is_late:
            self._fail_if_asked(step)
        result = super().run(step, max_rows)
        if self.is_late:
            self._fail_if_asked(step)
        return result

    def _fail_if_asked(self, step: Step) -> None:
        keys = {key_of(run.sequence) for run in step.runs}
        if (self.fails_once and len(keys) > 1) or self.victim in keys:
            self.fails_once = False
            self.guilty = self.guilty | keys if len(keys) == 1 else self.guilty
            raise RuntimeError("a fault that was asked for")


def on_graphs(model: NviumForCausalLM, cache: PagedCache, config: EngineConfig) -> PlainGraphs:
    return PlainGraphs(model, cache)


EXPECTED: dict[str, Completion] = {}


def expected(prompt: list[int], params: SamplingParams, choice: int) -> Completion:
    """Return the output of this choice when it runs alone."""
    single = replace(params, n=1, best_of=None, choice=choice)
    name = f"{prompt} {single}"
    if name not in EXPECTED:
        EXPECTED[name] = alone(MODEL, prompt, single)
    return EXPECTED[name]


class Serving(RuleBasedStateMachine):
    """Tracks the unfinished choices and their output so far."""

    @initialize(config=configs, make_inner=st.sampled_from([best_backend, best_backend, on_graphs]))
    def begin(self, config: EngineConfig, make_inner: MakeBackend) -> None:
        self.engine = engine_on(partial(FaultyBackend, make_inner=make_inner), MODEL, config)
        self.backend = self.engine.runner.backend
        self.num_requests = 0
        self.requests: dict[str, tuple[list[int], SamplingParams]] = {}
        self.alive: dict[Key, Completion] = {}

    @rule(prefix=st.sampled_from(PREFIXES), tail=tails, params=wishes, tenant=st.sampled_from(["", "one", "another"]))
    def add(self, prefix: list[int], tail: list[int], params: SamplingParams, tenant: str) -> None:
        self._add([*prefix, *tail], params, tenant)

    @rule(prefix=st.sampled_from(PREFIXES), max_tokens=st.integers(0, 5), n=st.integers(1, 2))
    def add_one_whose_prompt_is_scored(self, prefix: list[int], max_tokens: int, n: int) -> None:
        n = n if max_tokens else 1
        self._add([*prefix, 7, 8], SamplingParams(max_tokens=max_tokens, seed=9, n=n, logprobs=1, prompt_logprobs=True))

    def _add(self, prompt: list[int], params: SamplingParams, tenant: str = "") -> None:
        name = f"request-{self.num_requests}"
        self.num_requests += 1
        self.requests[name] = prompt, params
        self.engine.add(name, prompt, params, tenant=tenant)
        self.alive |= {(name, choice): Completion() for choice in range(params.n)}

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def cancel_a_request(self, data: st.DataObject) -> None:
        name, _ = data.draw(st.sampled_from(sorted(self.alive)))
        self.engine.cancel(name)
        for key in [key for key in self.alive if key[0] == name]:
            self._check_prefix(key)
            del self.alive[key]

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def cancel_a_choice(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.alive)))
        self.engine.cancel(*key)
        self._check_prefix(key)
        del self.alive[key]

    @rule(num_steps=st.integers(1, 12))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self._step()

    @rule(is_late=st.booleans())
    def step_until_a_fault_that_passes(self, is_late: bool) -> None:
        self._set_fault(fails_once=True, is_late=is_late)
        for _ in range(20):
            self._step()
            if not self.backend.fails_once:
                break
        self._set_fault()

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), is_late=st.booleans())
    def step_until_one_has_failed(self, data: st.DataObject, is_late: bool) -> None:
        victim = data.draw(st.sampled_from(sorted(self.alive)))
        self._set_fault(victim=victim, is_late=is_late)
        while victim in self.alive:
            self._step()
        self._set_fault()

    @rule()
    def drain(self) -> None:
        for _ in range(5_000):
            if not self.engine.has_work:
                break
            self._step()
            self.engine.check_integrity()
        assert not self.alive
        assert not self.engine.has_work

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.drain()
            assert self.engine.pool.num_free == self.engine.pool.num_pages
            assert not self.engine.admission.waiting
            assert not self.engine.admission.running

    @invariant()
    def pages_and_sequences_are_consistent(self) -> None:
        self.engine.check_integrity()
        admission = self.engine.admission
        held = {key_of(sequence): sequence for sequence in [*admission.waiting, *admission.running]}
        assert self.alive.keys() <= held.keys()
        for key in held.keys() - self.alive.keys():  # it has finished, and completes the prompt for its siblings
            assert held[key].finish_reason
            assert admission.prefills_for_others(held[key])

    def _set_fault(self, *, fails_once: bool = False, victim: Key | None = None, is_late: bool = False) -> None:
        backend = self.backend
        backend.fails_once, backend.victim, backend.is_late, backend.guilty = fails_once, victim, is_late, set()

    def _step(self) -> None:
        for event in self.engine.step():
            if isinstance(event, FailureEvent):
                assert key_of(event) in self.backend.guilty
                self._check_prefix(key_of(event))
                del self.alive[key_of(event)]
            else:
                self._append(event)

    def _append(self, event: Event) -> None:
        key = key_of(event)
        told = self.alive[key]
        told.append(event)
        if event.finish_reason is not None:
            self._check_prefix(key)
            assert len(told.token_ids) == len(self._expected(key).token_ids)
            assert told.finish_reason == self._expected(key).finish_reason
            del self.alive[key]

    def _check_prefix(self, key: Key) -> None:
        """Assert that the output so far is a prefix of the output of the request alone."""
        told, whole = self.alive[key], self._expected(key)
        assert told.token_ids == whole.token_ids[: len(told.token_ids)]
        assert told.exits == whole.exits[: len(told.exits)]
        probabilities = whole.exit_probabilities[: len(told.exits)]
        assert told.exit_probabilities == pytest.approx(probabilities, abs=1e-12)
        for scores, expected_scores in [(told.scores, whole.scores), (told.prompt_scores, whole.prompt_scores)]:
            logprobs = [score.logprob for score in expected_scores[: len(scores)]]
            assert [score.logprob for score in scores] == pytest.approx(logprobs, abs=1e-10)

    def _expected(self, key: Key) -> Completion:
        prompt, params = self.requests[key[0]]
        return expected(prompt, params, key[1])


Serving.TestCase.settings = settings(max_examples=settings().max_examples // 2, stateful_step_count=25)
TestServing = Serving.TestCase
