"""Sequences of every kind, which any backend can run through all blocks, and comparison of their outcomes."""

from collections.abc import Sequence as Items
from copy import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from nvium_core import NviumForCausalLM, SamplingParams
from nvium_core.choices import CachePrecision
from nvium_core.engine.device.paged_cache import PagedCache
from nvium_core.engine.schedule.sequence import Sequence
from nvium_core.engine.schedule.step import WHOLE, Backend, Outcome, Rows, Run, Step

ALL_ROWS = 10**6
KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"sampling": "mixture"},
    {"sampling": "original"},
    {"sampling": "mixture", "temperature": 0.0},
    {"sampling": "original", "temperature": 0.0},
    {"top_p": 0.9, "min_p": 0.01},
    {"top_k": 5, "top_p": 0.6, "sampling": "original"},
]


def seat_sequences(asked: Items[tuple[list[int], SamplingParams]], cache: PagedCache) -> list[Sequence]:
    """Sequences whose pages are scattered over the cache."""
    pages = torch.randperm(cache.null_page, generator=torch.Generator().manual_seed(0)).tolist()
    made = []
    for number, (prompt, params) in enumerate(asked):
        stops = frozenset(params.stop_token_ids)
        own = {"seed": number, "choice": number % 2, "stop_token_ids": stops}
        sequence = Sequence(str(number), prompt, params, num_blocks=3, arrival=0, **own)
        sequence.seat, sequence.pages = number, pages[number :: len(asked)]
        made.append(sequence)
    return made


def one_of_each_kind(cache: PagedCache, vocab_size: int, *more: dict[str, Any]) -> list[Sequence]:
    """Sequences of all `KINDS` and with these extra parameters, whose rows are all scored with alternatives."""
    kinds = [*KINDS, *more]
    prompts = [[(7 * n + 3 * t) % vocab_size for t in range(1 + 9 * n % 40)] for n in range(len(kinds))]
    params = [SamplingParams(**kind, logprobs=4, prompt_logprobs=True) for kind in kinds]
    return seat_sequences([*zip(prompts, params, strict=True)], cache)


def cache_of(
    model: NviumForCausalLM, num_pages: int = 128, page_size: int = 4, precision: CachePrecision = "auto"
) -> PagedCache:
    sizes = {"num_pages": num_pages, "page_size": page_size}
    return PagedCache(model.config, **sizes, like=model.lm_head.weight, choice=precision)


def carry(backend: Backend, sequences: Items[Sequence], most: int = 5) -> list[Outcome]:
    """Run all rows through every block, at most `most` rows per sequence and Step. Return each sequence's last outcome,
    with the scores of all Steps."""
    found = {sequence: Outcome([]) for sequence in sequences}
    while pending := [sequence for sequence in sequences if sequence.filled[-1] < sequence.num_tokens]:
        runs = [Run(sequence, min(sequence.num_tokens, sequence.filled[-1] + most)) for sequence in pending]
        result = backend.run(Step(range(3), runs, WHOLE), ALL_ROWS)
        for sequence, outcome in zip(pending, result.outcomes, strict=True):
            sequence.filled = outcome.filled
            sequence.num_scored += len(outcome.scores)
            outcome.scores = [*found[sequence].scores, *outcome.scores]
            found[sequence] = outcome
    return list(found.values())


def assert_alike(found: Items[Outcome], expected: Items[Outcome], tolerance: float) -> None:
    close: Any = {"abs": tolerance, "rel": tolerance, "nan_ok": True}
    for one, other in zip(found, expected, strict=True):
        assert one.filled == other.filled
        assert [emission[:2] for emission in one.emissions] == [emission[:2] for emission in other.emissions]
        for each, same in zip(one.emissions, other.emissions, strict=True):
            assert each.log_p == pytest.approx(same.log_p, **close)
        if not one.emissions:
            assert one.log_reached == pytest.approx(other.log_reached, **close)
        for score, same in zip(one.scores, other.scores, strict=True):
            assert score.logprob == pytest.approx(same.logprob, **close)
            if tolerance < 1e-3:  # otherwise tokens that are almost as probable may change places
                assert [token for token, _ in score.top] == [token for token, _ in same.top]
            assert [log for _, log in score.top] == pytest.approx([log for _, log in same.top], **close)
            assert score.exit_probabilities == pytest.approx(same.exit_probabilities, **close)


def rows_of(cache: PagedCache, sequences: Items[Sequence]) -> list[Tensor]:
    """Return keys, values and states of all rows, but after the last block only states of fronts and of sequences whose
    prompts are scored: a backend may leave out states that are not read."""
    firsts = [0 if each.params.prompt_logprobs and each.choice == 0 else each.num_tokens - 1 for each in sequences]
    own, read = (
        cache.slots([Rows(each, range(first, each.filled[-1])) for each, first in zip(sequences, some, strict=True)])
        for some in ([0] * len(sequences), firsts)
    )
    return [cache.keys[:, own], cache.values[:, own], cache.states_NSD[:-1, own], cache.states_NSD[-1, read]]


def native_rows_of(cache: PagedCache, sequences: Items[Sequence]) -> list[Tensor]:
    """Return `rows_of` a cache in the order of call.h."""
    num_calls, _, num_heads, size = cache.keys.shape
    keys = cache.keys.view(-1, num_calls, num_heads, size, cache.page_size).permute(1, 0, 4, 2, 3)
    values = cache.values.view(-1, num_calls, num_heads, cache.page_size, size).permute(1, 0, 3, 2, 4)
    other = copy(cache)
    other.keys, other.values = (each.reshape(cache.keys.shape) for each in (keys, values))
    return rows_of(other, sequences)
