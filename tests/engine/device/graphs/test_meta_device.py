"""Everything that runs on a device, run on the meta device: no operator sees tensors of two devices, and values come to
the host only where they are asked for.

The meta device has no data. What is brought to the host is zeros, so every front exits where it may.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from nvium_core import Engine, EngineConfig, FailureEvent, SamplingParams
from nvium_core.choices import Schedule
from nvium_core.engine.device.graphs import GraphsBackend
from nvium_core.engine.device.layers import fixed_order
from nvium_core.engine.device.layers.backend import LayersBackend
from nvium_core.engine.device.layers.fixed_order import FixedOrderBackend
from nvium_core.engine.device.runner import MakeBackend, Runner
from tests.engine.automaton import Automaton, Rule
from tests.engine.device.graphs.test_host_traffic import Crossing
from tests.engine.driving import events_of
from tests.engine.test_original import Whims
from tests.random_models import random_model

VOCAB_SIZE = 17
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "ranked": {"top_k": 3, "top_p": 0.8, "min_p": 0.1, "temperature": 0.7},
    "greedy": {"temperature": 0.0},
    "mixture": {"sampling": "mixture"},
    "scored": {"logprobs": 2, "prompt_logprobs": True},
    "adjusted": {"presence_penalty": 1.0, "repetition_penalty": 1.3, "logit_bias": {3: 1.0}, "min_tokens": 2},
    "constrained": {"constraint": Automaton(Rule(1, VOCAB_SIZE, 5, 3, 1.0))},
}


ORIGINALS: list[dict[str, Any]] = [
    {"sampling": "original"},
    {"sampling": "original", "temperature": 0.0},
    {"sampling": "original", "top_k": 3, "top_p": 0.8},
    {"sampling": "original", "logprobs": 2},
    {},
]


class CrossingByCopy(Crossing):
    """Tensors cross between devices as a whole, by name."""

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Items[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if str(func).startswith(("aten.to.", "aten._to_copy.", "aten.copy_.")):
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)


class ToHost(TorchFunctionMode):
    """Values that are asked for by name are zeros; whatever else needs one raises, as the meta device does."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Items[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is Tensor.tolist and args[0].is_meta:
            self.counts["tolist"] += 1
            return torch.zeros(args[0].shape, dtype=args[0].dtype).tolist()
        if func is Tensor.copy_ and args[1].is_meta and not args[0].is_meta:
            self.counts["copy_"] += 1
            return args[0].zero_()
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("schedule", ["sweep", "synchronous"])
@pytest.mark.parametrize("make_backend", [LayersBackend, GraphsBackend, FixedOrderBackend])
def test_drafts_and_those_who_verify_them_meet_no_others(
    make_backend: MakeBackend, schedule: Schedule, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of exits, of the drafter and of copies, beside a sequence that samples from exits."""
    monkeypatch.setattr(fixed_order, "tile_size", lambda _: 4)
    parts = {"context": 256, "dtype": torch.bfloat16, "drafter_hidden_size": 8}
    model = random_model([1, 2, 4], vocab_size=VOCAB_SIZE, **parts).to("meta")
    config = EngineConfig(schedule=schedule, max_sequences=8, deterministic=make_backend is FixedOrderBackend)
    engine = Engine(model, config, make_runner=partial(Runner, make_backend=make_backend))
    engine.scheduler.drafting = Whims(3, seed=1)
    check_tensors_meet_no_others(engine, ORIGINALS, max_tokens=8)


@pytest.mark.parametrize("schedule", ["sweep", "synchronous"])
@pytest.mark.parametrize("kind", ["plain", "all"])
@pytest.mark.parametrize("make_backend", [LayersBackend, GraphsBackend], ids=["layers", "graphs"])
def test_tensors_of_the_device_meet_no_others(make_backend: MakeBackend, kind: str, schedule: Schedule) -> None:
    model = random_model([1, 2, 4], vocab_size=VOCAB_SIZE, context=256, dtype=torch.bfloat16).to("meta")
    config = EngineConfig(schedule=schedule, max_sequences=16)
    engine = Engine(model, config, make_runner=partial(Runner, make_backend=make_backend))
    check_tensors_meet_no_others(engine, list(KINDS.values()) if kind == "all" else [KINDS[kind]] * 2, max_tokens=4)


def check_tensors_meet_no_others(engine: Engine, kinds: Items[Mapping[str, Any]], max_tokens: int) -> None:
    """Of a device that has no memory: a sequence of each kind, the first with a prompt of some length."""
    for number, wishes in enumerate(kinds):
        params = SamplingParams(max_tokens=max_tokens, seed=number, ignore_eos=True, **wishes)
        engine.add(str(number), [1] * (1 if number else 150), params)
    with CrossingByCopy(), ToHost() as to_host:
        failed = [event for event in events_of(engine) if isinstance(event, FailureEvent)]
    assert not failed
    assert +to_host.counts
