"""The device code on the meta device: no operator mixes devices, and values reach the host only by intended copies.

The meta device has no data. The host reads zeros, so every front row exits as early as it may.
"""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from nvium_core import EngineConfig, FailureEvent, SamplingParams
from nvium_core.engine.device.layers import LayersBackend
from tests.engine.automaton import Automaton, Rule
from tests.engine.device.graphs.engines import PlainGraphs
from tests.engine.driving import engine_on, events_of
from tests.random_models import random_model

VOCAB_SIZE = 17
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "ranked": {"top_k": 3, "top_p": 0.8, "min_p": 0.1, "temperature": 0.7},
    "greedy": {"temperature": 0.0},
    "mixture": {"sampling": "mixture"},
    "race": {"sampling": "original"},
    "greedy race": {"sampling": "original", "temperature": 0.0},
    "scored": {"logprobs": 2, "prompt_logprobs": True},
    "adjusted": {"presence_penalty": 1.0, "repetition_penalty": 1.3, "logit_bias": {3: 1.0}, "min_tokens": 2},
    "constrained": {"constraint": Automaton(Rule(1, VOCAB_SIZE, 5, 3, 1.0))},
}


class Crossing(TorchDispatchMode):
    """Raises if an operator other than a copy has tensors of several devices."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not str(func).startswith(("aten.to.", "aten._to_copy.", "aten.copy_.")):
            seen = torch.utils._pytree.tree_leaves((args, kwargs, out))
            devices = {leaf.device for leaf in seen if isinstance(leaf, Tensor)}
            assert len(devices) < 2, f"{func} is of {devices}"
        return out


class ToHost(TorchFunctionMode):
    """Returns zeros for values copied to or read on the host. Other operators that need a value raise."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is Tensor.tolist and args[0].is_meta:
            self.counts["read"] += 1
            make = torch.ones if args[0].dtype == torch.bool else torch.zeros
            return make(args[0].shape, dtype=args[0].dtype).tolist()
        if func is Tensor.copy_ and args[1].is_meta and not args[0].is_meta:
            self.counts["copied to the host"] += 1
            return args[0].zero_()
        if func is Tensor.copy_ and args[0].is_meta and not args[1].is_meta:
            self.counts["copied to the device"] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("schedule", ["sweep", "whole"])
@pytest.mark.parametrize("kind", [*KINDS, "all"])
@pytest.mark.parametrize("backend", [LayersBackend, PlainGraphs])
def test_no_operator_mixes_devices(backend, kind, schedule):
    model = random_model([1, 2, 4], vocab_size=VOCAB_SIZE, context=256, dtype=torch.bfloat16).to("meta")
    config = EngineConfig(schedule=schedule, max_sequences=16)
    engine = engine_on(lambda model, cache, _: backend(model, cache), model, config)
    for number, wishes in enumerate(KINDS.values() if kind == "all" else [KINDS[kind]] * 2):
        params = SamplingParams(max_tokens=4, seed=number, ignore_eos=True, **wishes)
        engine.add(str(number), [1] * (1 if number else 150), params)
    with Crossing(), ToHost() as to_host:
        failed = [event for event in events_of(engine) if isinstance(event, FailureEvent)]
    assert not failed
    assert +to_host.counts


@pytest.mark.parametrize("kind", ["plain", "ranked", "greedy", "mixture", "race", "adjusted"])
def test_a_pass_is_one_copy_to_the_device_and_one_back(kind):
    model = random_model([1, 2, 4], vocab_size=VOCAB_SIZE).to("meta")
    config = EngineConfig(schedule="whole", max_sequences=2, max_drafts=0)
    engine = engine_on(lambda model, cache, _: PlainGraphs(model, cache), model, config)
    for number in range(2):
        engine.add(str(number), [1, 2], SamplingParams(max_tokens=9, seed=number, ignore_eos=True, **KINDS[kind]))
    with ToHost() as to_host:
        assert list(events_of(engine))
    passes = to_host.counts["copied to the host"]
    assert to_host.counts == {"copied to the host": passes, "copied to the device": passes}
    assert passes >= 9
