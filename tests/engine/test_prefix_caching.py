from collections import Counter
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nvium_core import Engine, EngineConfig, FailureEvent, NviumForCausalLM, SamplingParams
from nvium_core.engine.device import memory
from nvium_core.engine.device.paged_cache import PagedCache
from nvium_core.engine.schedule.kv_cache import PagePool
from nvium_core.engine.schedule.sequence import Sequence
from nvium_core.engine.schedule.step import Step, StepResult
from tests.engine.driving import (
    PAGE_SIZE,
    PROMPT,
    WrappedBackend,
    alone,
    engine_on,
    engine_with,
    events_of,
    logprobs_of,
    small_model,
)

PARAMS = SamplingParams(max_tokens=6, seed=2, ignore_eos=True)
NUM_BLOCKS = 3

MODEL = small_model()


def num_rows_found(engine: Engine, prompt: list[int], params: SamplingParams = PARAMS) -> int:
    """Run a request. Return the number of rows found in the cache."""
    before = engine.pool.num_rows_found
    engine.generate([prompt], params)
    return engine.pool.num_rows_found - before


def test_a_prompt_with_one_generated_token_is_cached_by_whole_and_its_rows_are_not_computed_again():
    engine, params = engine_with(MODEL, "whole"), SamplingParams(max_tokens=1)
    assert [num_rows_found(engine, PROMPT, params) for _ in range(2)] == [0, 8]
    engine.add("again", PROMPT, PARAMS)
    engine.step()
    report = engine.reports[0]
    assert report.num_rows - (report.num_passes - 1) == len(PROMPT) - 8


def test_the_next_turn_of_a_conversation_finds_the_earlier_turns():
    engine = engine_with(MODEL)
    (answer,) = engine.generate([PROMPT], SamplingParams(max_tokens=7, seed=2, ignore_eos=True))
    conversation = [*PROMPT, *answer.token_ids, 7, 7]
    (reply,) = engine.generate([conversation], PARAMS)
    assert engine.pool.num_rows_found == 16
    assert reply.token_ids == alone(MODEL, conversation, PARAMS).token_ids


def test_memory_does_not_grow_with_new_prompts_but_does_for_a_prefix_that_would_be_evicted_again(monkeypatch):
    page_bytes = memory.page_bytes(MODEL.config, PAGE_SIZE, MODEL.dtype, MODEL.dtype)
    monkeypatch.setattr(memory, "PREFERRED_BYTES", 5 * page_bytes)
    engine = engine_with(MODEL, cache_tokens=64 * PAGE_SIZE)
    prompts = [[token, 1, 2, 3, 4, 5, 6, 7, 8] for token in range(7)]
    assert [num_rows_found(engine, prompt) for prompt in prompts] == [0] * 7
    assert engine.pool.num_used == 5
    turns = [num_rows_found(engine, prompt) for _ in range(3) for prompt in prompts[:3]]
    assert turns == [0, 0, 0, *[8] * 6]
    assert 5 < engine.pool.num_used <= 12


def test_nothing_is_found_without_prefix_caching():
    engine = engine_with(MODEL, prefix_caching=False)
    assert [num_rows_found(engine, PROMPT) for _ in range(2)] == [0, 0]


def test_a_scored_prompt_is_computed_again_and_then_cached():
    engine = engine_with(MODEL)
    scored = SamplingParams(max_tokens=3, seed=2, ignore_eos=True, logprobs=0, prompt_logprobs=True)
    engine.generate([PROMPT], PARAMS)
    (completion,) = engine.generate([PROMPT], scored)
    assert engine.pool.num_rows_found == 0
    assert [score.logprob for score in completion.prompt_scores] == pytest.approx(logprobs_of(MODEL, PROMPT))
    assert num_rows_found(engine, PROMPT) == 8
    assert num_rows_found(engine, PROMPT, SamplingParams(max_tokens=3, logprobs=0)) == 8


@dataclass
class PlainPool:
    """A slow pool: the content of a page is the tuple of all tokens up to the page's end."""

    num_pages: int
    num_preferred: int
    num_used: int = 0
    content: dict[int, tuple[int, ...]] = field(default_factory=dict)
    unowned: list[int] = field(default_factory=list)
    """Pages with content but without owner, least recently used first."""
    evicted: list[tuple[int, ...]] = field(default_factory=list)
    """Contents that were evicted before all pages were used, oldest first."""

    def found(self, tokens: list[int]) -> list[int]:
        pages = {content: page for page, content in self.content.items()}
        found = list[int]()
        prefixes = [tuple(tokens[:end]) for end in range(PAGE_SIZE, len(tokens), PAGE_SIZE)]
        for prefix in prefixes:
            if prefix not in pages:
                break
            found.append(pages[prefix])
        missed = [prefix for prefix in prefixes[len(found) :] if prefix in self.evicted]
        self.evicted = [content for content in self.evicted if content not in missed]
        self.num_preferred = min(self.num_pages, self.num_preferred + len(missed))
        return found

    def take(self, pages: set[int], owned: Counter[int]) -> int:
        """Remove the page that was to be allocated next from the pages that were, and forget its content."""
        if blank := {*range(self.num_used)} - owned.keys() - {*self.unowned}:
            page = min(blank & pages)
        elif self.unowned and self.num_used >= self.num_preferred:
            page = self.unowned.pop(0)
            if self.num_used < self.num_pages and self.content[page] not in self.evicted:
                self.evicted = [*self.evicted, self.content[page]][-self.num_pages :]
        else:
            page = self.num_used
            self.num_used += 1
        pages.remove(page)
        self.content.pop(page, None)
        return page

    def completed(self, sequence: Sequence, since: int) -> None:
        for index in range(since // PAGE_SIZE, sequence.filled[-1] // PAGE_SIZE):
            page, content = sequence.pages[index], tuple(sequence.token_ids[: (index + 1) * PAGE_SIZE])
            if page not in self.content and content not in self.content.values():
                self.content[page] = content

    def released(self, pages: list[int], owned: Counter[int]) -> None:
        self.unowned += [page for page in reversed(pages) if page in self.content and owned[page] == 1]


class TwoPools:
    """Applies the same operations to a real pool and a plain one."""

    def __init__(self, num_pages: int, num_preferred: int) -> None:
        self.pool = PagePool(num_pages, PAGE_SIZE, num_preferred=num_preferred)
        self.plain = PlainPool(num_pages, num_preferred)
        self.living = list[Sequence]()

    @property
    def owned(self) -> Counter[int]:
        return Counter(page for sequence in self.living for page in sequence.pages)

    def begin(self, tokens: list[int]) -> None:
        sequence = Sequence("s", tokens, SamplingParams(), seed=0, num_blocks=NUM_BLOCKS, arrival=0)
        found = self.pool.match(sequence)
        assert found == self.plain.found(tokens)
        assert self.pool.num_free_without(found) == self.plain.num_pages - len(self.owned.keys() | {*found})
        self.plain.unowned = [page for page in self.plain.unowned if page not in found]
        self.pool.acquire(sequence, found)
        assert sequence.filled == [len(found) * PAGE_SIZE] * NUM_BLOCKS
        self.living.append(sequence)

    def go_on(self, sequence: Sequence, block: int, most_rows: int) -> None:
        rows = sequence.pending_rows(block)[:most_rows]
        before, num_pages_before = self.owned, len(sequence.pages)
        num_missing = max(0, -(-rows.stop // PAGE_SIZE) - num_pages_before)
        has_grown = self.pool.grow(sequence, rows.stop)
        assert has_grown == (num_missing <= self.plain.num_pages - len(before))
        assert len(sequence.pages) == num_pages_before + num_missing * has_grown
        allocated = {*sequence.pages[num_pages_before:]}
        while allocated:
            before[self.plain.take(allocated, before)] += 1
        if has_grown:
            self._pass(sequence, block, rows)

    def _pass(self, sequence: Sequence, block: int, rows: range) -> None:
        sequence.filled[block] = rows.stop
        if block == NUM_BLOCKS - 1:
            self.pool.register(sequence, since=rows.start)
            self.plain.completed(sequence, since=rows.start)

    def end(self, sequence: Sequence) -> None:
        self.plain.released(sequence.pages, self.owned)
        self.pool.release(sequence)
        self.living.remove(sequence)

    def check(self) -> None:
        self.pool.check_integrity(self.living)
        assert self.pool.num_free == self.plain.num_pages - len(self.owned)
        assert self.pool.num_used == self.plain.num_used


tokens = st.lists(st.integers(0, 1), min_size=1, max_size=5 * PAGE_SIZE)


@given(st.integers(5, 12), st.integers(0, 12), st.data())
def test_the_pool_equals_a_slow_one(num_pages, num_preferred, data):
    pools = TwoPools(num_pages, min(num_pages, num_preferred))
    for _ in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(["begin", "go on", "go on", "go on", "end"])) if pools.living else "begin"
        if action == "begin":
            pools.begin(data.draw(tokens))
        elif action == "end":
            pools.end(data.draw(st.sampled_from(pools.living)))
        else:
            block, most_rows = data.draw(st.tuples(st.integers(0, NUM_BLOCKS - 1), st.integers(1, 20)))
            pools.go_on(data.draw(st.sampled_from(pools.living)), block, most_rows)
        pools.check()


class OnceBroken(WrappedBackend):
    """Sets all keys to NaN after the first Step."""

    is_broken = True

    def __init__(self, model: NviumForCausalLM, cache: PagedCache, config: EngineConfig) -> None:
        super().__init__(model, cache, config)
        self.cache = cache

    def run(self, step: Step, max_rows: int) -> StepResult:
        result = super().run(step, max_rows)
        if self.is_broken:
            self.is_broken = False
            self.cache.keys.fill_(torch.nan)
        return result


def test_pages_of_a_sequence_that_failed_are_not_found():
    engine = engine_on(OnceBroken, MODEL, EngineConfig(max_rows_per_step=8, page_size=PAGE_SIZE))
    prompt = [number % 7 for number in range(20)]
    engine.add("broken", prompt, PARAMS)
    assert [type(event) for event in events_of(engine)] == [FailureEvent]
    (after,) = engine.generate([prompt], PARAMS)
    expected = alone(MODEL, prompt, PARAMS)
    assert (after.token_ids, after.exits) == (expected.token_ids, expected.exits)
