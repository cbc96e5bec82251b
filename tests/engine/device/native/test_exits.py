"""Routers and heads in native calls against the model's own."""

import ctypes
import math
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from nvium_core import NviumForCausalLM
from nvium_core.bench.shapes import force_routing
from nvium_core.engine.device.layers.backend import LayersBackend
from nvium_core.engine.device.native.fronts import NativeFronts
from nvium_core.engine.device.native.packing import NOTHING
from nvium_core.engine.device.native.weights import Store
from nvium_core.engine.device.paged_cache import PagedCache
from nvium_core.engine.device.sampling import NO_TOKEN
from nvium_core.engine.params import SamplingParams
from nvium_core.engine.schedule.sequence import Sequence
from tests.engine.cached_blocks import TOLERANCE
from tests.random_models import random_model

MODEL = random_model([1, 3], width=48, vocab_size=50)

wishes = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.3, 1.0, 1.9]),
        "top_p": st.sampled_from([1.0, 1.0, 1.0, 0.4]),
        "min_p": st.sampled_from([0.0, 0.03]),
        "min_tokens": st.sampled_from([0, 0, 0, 2]),
        "stop_token_ids": st.just((3, 7)),
        "presence_penalty": st.sampled_from([0.0, 0.0, 0.0, 1.0]),
    }
)


LARGEST_UNIFORM = 1 - 2.0**-53
NUM_SLOTS = 12
SLOTS = [7, 0, 11, 3, 5, 2, 9, 10]


def states(width: int, dtype: torch.dtype) -> Tensor:
    """Behind every block, in slots of which some are asked for."""
    return torch.randn(3, NUM_SLOTS, width, generator=torch.Generator().manual_seed(1)).to(dtype)


def sequence(params: SamplingParams) -> Sequence:
    return Sequence("a", [1, 2], params, seed=0, num_blocks=2, arrival=0)


def layers_over(model: NviumForCausalLM, states_NSD: Tensor) -> LayersBackend:
    cache = PagedCache(model.config, num_pages=1, page_size=1, like=model.lm_head.weight)
    cache.states_NSD = states_NSD
    return LayersBackend(model, cache)


@torch.inference_mode()
def test_an_adapter_that_adds_nothing_is_left_out(library: ctypes.CDLL) -> None:
    model, states_NSD = random_model([1, 3], width=48, vocab_size=50), states(48, torch.float64)
    last = model.exits[1]
    last.get_parameter("adapter.down.weight").zero_()
    fast = NativeFronts(library, model, states_NSD)
    x_RD, _ = fast.route(1, SLOTS)
    alone = fast.logits(1, x_RD)
    torch.testing.assert_close(alone, layers_over(model, states_NSD).logits(1, x_RD), rtol=0, atol=1e-12)
    exits = Store(model, library.vector_bytes()).exits()
    assert [stored._kept.count(NOTHING) for stored in exits] == [0, 5]  # the last exit has no router either
    last.get_parameter("adapter.up.weight")[0, 0] = torch.nan
    assert NativeFronts(library, model, states_NSD).logits(1, x_RD).isnan().any()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("exit_layers", [[1, 2, 3], [2]])
@pytest.mark.parametrize("num_rows", [1, 3, 8])
@torch.inference_mode()
def test_routes_and_logits_are_the_models(
    library: ctypes.CDLL, dtype: torch.dtype, exit_layers: list[int], num_rows: int
) -> None:
    model = random_model(exit_layers, dtype=dtype, width=48, vocab_size=50)
    states_NSD = states(48, dtype)
    plain, fast = layers_over(model, states_NSD), NativeFronts(library, model, states_NSD)
    for block in range(len(exit_layers)):
        x_FD, log_w = plain.route(block, SLOTS[:num_rows])
        fast_x_FD, fast_log_w = fast.route(block, SLOTS[:num_rows])
        torch.testing.assert_close(fast_x_FD, x_FD.to(fast_x_FD), rtol=0, atol=TOLERANCE[dtype])
        torch.testing.assert_close(torch.tensor(fast_log_w), torch.tensor(log_w), rtol=0, atol=TOLERANCE[dtype])
        logits_RV = model.lm_head(model.exits[block].adapter(x_FD))
        fast_logits_RV = fast.logits(block, fast_x_FD)
        torch.testing.assert_close(fast_logits_RV, logits_RV.to(fast_x_FD), rtol=0, atol=3 * TOLERANCE[dtype])


@example([(2, {"temperature": 0.3, "stop_token_ids": (3, 7)}, 2**53 - 1)])
@given(
    st.lists(st.tuples(st.integers(0, 7), wishes, st.integers(0, 2**53 - 1)), min_size=1, max_size=6),
)
@torch.inference_mode()
def test_tokens_are_those_that_the_layers_draw(
    library: ctypes.CDLL, asked: list[tuple[int, dict[str, Any], int]]
) -> None:
    """A uniform nearer to the bound between two tokens than sums are exact may be either's."""
    model, states_NSD = MODEL, states(48, torch.float64)
    rows, sequences = [row for row, _, _ in asked], [sequence(SamplingParams(**each)) for _, each, _ in asked]

    def drawn(exits: LayersBackend | NativeFronts, error: float = 0.0) -> list[int]:
        x_FD, _ = exits.route(1, SLOTS)
        uniforms = [min(max(0.0, bits * 2.0**-53 + error), LARGEST_UNIFORM) for _, _, bits in asked]
        return exits.draw(1, x_FD, rows, sequences, uniforms)

    layers = layers_over(model, states_NSD)
    about = zip(*(drawn(layers, error) for error in (-1e-12, 0.0, 1e-12)), strict=True)
    for token, tokens in zip(drawn(NativeFronts(library, model, states_NSD)), about, strict=True):
        assert token in tokens


@torch.inference_mode()
def test_an_answer_does_not_depend_on_who_else_asks(library: ctypes.CDLL) -> None:
    model = random_model([1, 2], dtype=torch.float32, width=48, vocab_size=50)
    exits = NativeFronts(library, model, states(48, torch.float32))
    x_FD, log_w = exits.route(0, SLOTS)
    logits_RV = exits.logits(0, x_FD)
    for row, slot in enumerate(SLOTS):
        x_1D, log_w_alone = exits.route(0, [slot])
        assert log_w_alone == [log_w[row]]
        assert torch.equal(exits.logits(0, x_1D)[0], logits_RV[row])


@pytest.mark.parametrize("dtype", TOLERANCE)
@torch.inference_mode()
def test_a_routing_that_was_forced_is_followed_in_any_precision(library: ctypes.CDLL, dtype: torch.dtype) -> None:
    model = random_model([1, 2, 3], dtype=dtype, width=48, vocab_size=50)
    force_routing(model, [0.2, 0.3, 0.5])
    exits = NativeFronts(library, model, states(48, dtype))
    for block, leaving in enumerate((0.2, 0.3 / 0.8, 1.0)):
        _, log_w = exits.route(block, SLOTS)
        assert [math.exp(to_leave) for _, to_leave in log_w] == pytest.approx([leaving] * len(SLOTS), abs=1e-6)


@torch.inference_mode()
def test_what_is_not_finite_stays_so(library: ctypes.CDLL) -> None:
    exits = NativeFronts(library, random_model([1, 2]), torch.full((2, 1, 16), torch.nan, dtype=torch.float64))
    x_FD, log_w = exits.route(0, [0])
    assert all(map(math.isnan, log_w[0]))
    assert exits.draw(0, x_FD, [0], [sequence(SamplingParams())], [0.5]) == [NO_TOKEN]
