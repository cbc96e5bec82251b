"""Runs engines to completion, with an integrity check after every Step."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from nvium_core import Completion, Engine, EngineConfig, FailureEvent, NviumForCausalLM, SamplingParams
from nvium_core.choices import Schedule
from nvium_core.engine.device.layers import LayersBackend
from nvium_core.engine.device.paged_cache import PagedCache
from nvium_core.engine.device.runner import MakeBackend, best_backend
from nvium_core.engine.events import Event
from nvium_core.engine.sampling_params import DRAW, Draw
from nvium_core.engine.schedule.step import Step, StepResult
from tests.random_models import random_model

Key = tuple[str, int]
"""A request's id and the index of one of its choices."""

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
PAGE_SIZE = 4

MAX_STEPS = 20_000


def events_of(engine: Engine) -> Iterator[Event]:
    for _ in range(MAX_STEPS):
        if not engine.has_work:
            return
        yield from engine.step()
        engine.check_integrity()
    raise AssertionError("the engine does not finish")


def together(engine: Engine, requests: Sequence[tuple[Sequence[int], SamplingParams]]) -> list[Completion]:
    """Return the output of the first choice of each request, all added at once."""
    for number, (prompt, params) in enumerate(requests):
        engine.add(str(number), prompt, params)
    told = drained(engine)
    return [told[str(number), 0] for number in range(len(requests))]


def drained(engine: Engine) -> dict[Key, Completion]:
    """Return the output of each choice, once the engine has no work. Assert that none fails and no page leaks."""
    told: dict[Key, Completion] = defaultdict(Completion)
    for event in events_of(engine):
        assert not isinstance(event, FailureEvent), event
        told[event.request_id, event.choice].append(event)
    assert engine.pool.num_free == engine.pool.num_pages
    return dict(told)


def small_model(context: int = 64) -> NviumForCausalLM:
    """Build a model with three exits and a vocabulary of 17 tokens."""
    return random_model([1, 2, 3], seed=5, width=8, num_heads=2, num_key_heads=1, context=context)


def engine_with(model: NviumForCausalLM, schedule: Schedule = "whole", **settings: object) -> Engine:
    return Engine(model, EngineConfig(schedule=schedule, page_size=PAGE_SIZE, **settings))


def alone(model: NviumForCausalLM, prompt: Sequence[int], params: SamplingParams) -> Completion:
    """Return the output of the first choice of a request that runs alone, without prefix caching."""
    config = EngineConfig(schedule="sweep", max_sequences=1, prefix_caching=False)
    (completion,) = Engine(model, config).generate([prompt], replace(params, n=1, best_of=None))
    return completion


class WrappedBackend:
    """Another backend, by default the best, for subclasses that inject faults."""

    def __init__(
        self, model: NviumForCausalLM, cache: PagedCache, config: EngineConfig, make_inner: MakeBackend = best_backend
    ) -> None:
        self.inner = make_inner(model, cache, config)
        self.num_multi_steps, self.async_scheduling = self.inner.num_multi_steps, self.inner.async_scheduling
        self.instructions, self.eager_passes = self.inner.instructions, self.inner.eager_passes

    def prepare(self, config: EngineConfig) -> None:
        self.inner.prepare(config)

    def run(self, step: Step, max_rows: int) -> StepResult:
        return self.inner.run(step, max_rows)


class Layers(WrappedBackend):
    """PyTorch's layers, the reference."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args, make_inner=lambda model, cache, config: LayersBackend(model, cache))


def engine_on(backend: Callable[..., WrappedBackend], model: NviumForCausalLM, config: EngineConfig) -> Engine:
    return Engine(model, config, make_backend=backend)


def columns(draws: Sequence[Draw]) -> dict[str, torch.Tensor]:
    """Return sampling parameters of rows as the sampler reads them."""
    record_R = np.array(draws, DRAW)
    return {name: torch.from_numpy(np.ascontiguousarray(record_R[name])) for name in Draw._fields}


@torch.no_grad()
def log_mixtures(model: NviumForCausalLM, token_ids: Sequence[int]) -> torch.Tensor:
    """Return log π_mix after every token, [T, V], from one full forward pass."""
    return model(torch.tensor([list(token_ids)])).logits[0]


@torch.no_grad()
def exit_probabilities(model: NviumForCausalLM, token_ids: Sequence[int]) -> list[list[float]]:
    """Return p_k of every exit after every token, [T, E], from one full forward pass."""
    return model(torch.tensor([list(token_ids)])).exit_probs[0].tolist()


def logprobs_of(model: NviumForCausalLM, token_ids: Sequence[int]) -> list[float]:
    """Return log π_mix of every token but the first."""
    log_mix_TV = log_mixtures(model, token_ids)
    return [float(log_mix_TV[t, token]) for t, token in enumerate(token_ids[1:])]
