import ctypes
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nvium_core.choices import Instructions
from nvium_core.engine.device import sampling
from nvium_core.engine.device.native.library import FLAGS
from nvium_core.engine.sampling_params import DRAW, Draw, SamplingParams
from nvium_core.engine.schedule.step import NO_TOKEN
from tests.engine.device.native.compiling import compiled
from tests.engine.driving import columns
from tests.reference import PURPOSES, uniform

logits = st.sampled_from([-math.inf, -2.0, -1.0, 0.0, 0.5]) | st.floats(-900, 900, width=32)
logit_rows = st.lists(logits, min_size=21, max_size=21).filter(lambda row: max(row) > -math.inf)
wishes = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.01, 0.3, 1.0, 1.9]),
        "top_k": st.sampled_from([0, 0, 0, 1, 3, 20, 2**31 - 1]),
        "top_p": st.sampled_from([1.0, 1.0, 0.95, 0.6, 0.05, 5e-324]),
        "min_p": st.sampled_from([0.0, 0.03, 0.4, 1.0]),
    }
)
ways = st.sampled_from(["mixture", "original"])
uniforms = st.integers(0, 2**53 - 1).map(lambda bits: bits * 2.0**-53)
rows = st.tuples(logit_rows, wishes, uniforms)


@pytest.fixture(scope="session")
def library(instructions: Instructions) -> ctypes.CDLL:
    library = ctypes.CDLL(str(compiled("draw.cpp", "c++", "-O2", "-shared", "-fPIC", *FLAGS[instructions])))
    pointer, count = ctypes.c_void_p, ctypes.c_int64
    library.draw.argtypes, library.draw.restype = [pointer, count, count, pointer, pointer, pointer], None
    library.uniform.argtypes, library.uniform.restype = [count] * 5, ctypes.c_double
    return library


def draw_tokens(library: ctypes.CDLL, logits_RV: torch.Tensor, draws: list[Draw], uniform_R: list[float]) -> list[int]:
    draw_R, token_R, logits_RV = np.array(draws, DRAW), np.zeros(len(draws), np.int64), logits_RV.contiguous()
    arrays = (array.ctypes.data for array in (draw_R, np.array(uniform_R), token_R))
    library.draw(logits_RV.data_ptr(), *logits_RV.shape, *arrays)
    return token_R.tolist()


keys = st.tuples(st.integers(-(2**63), 2**63 - 1), *[st.integers(0, 2**31 - 1)] * 3)


@given(keys, st.sampled_from(PURPOSES))
def test_random_numbers_equal_those_of_numpy(library, key, purpose):
    assert library.uniform(*key, PURPOSES.index(purpose)) == uniform(*key, purpose)


@given(st.lists(rows, min_size=1, max_size=5), ways)
def test_draws_equal_those_of_pytorch(library, rows, way):
    logits, asked, uniform = zip(*rows, strict=True)
    logits_RV, params = torch.tensor(logits, dtype=torch.float64), [SamplingParams(**each) for each in asked]
    draws = [replace(each, sampling=way).draw() for each in params]
    pick = sampling.race if way == "original" else sampling.draw
    expected = pick(logits_RV, columns(draws), torch.tensor(uniform, dtype=torch.float64), is_ranked=True).tolist()
    for row, (token, other) in enumerate(zip(draw_tokens(library, logits_RV, draws, uniform), expected, strict=True)):
        assert token == other or is_at_an_edge(logits_RV[row], params[row], uniform[row])


@pytest.mark.parametrize("spread", [0.01, 1.0, 4.0, 40.0])
@pytest.mark.parametrize(("k", "p"), [(0, 0.0203), (0, 0.9503), (0, 1 - 1e-9), (40, 1.0), (700, 0.8003)])
@pytest.mark.parametrize("are_many_equal", [False, True])
@pytest.mark.parametrize("vocab_size", [5000, 5003])
def test_truncation_of_a_large_vocabulary_keeps_what_a_sort_keeps(library, spread, k, p, are_many_equal, vocab_size):
    """With equal logits too. No top-p or uniform is a multiple of their probability, where rounding would decide."""
    logits_RV = spread * torch.randn(3, vocab_size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    if are_many_equal:
        logits_RV = logits_RV.round(decimals=1)
    logits_RV, draws = logits_RV.repeat(40, 1), [SamplingParams(top_k=k, top_p=p).draw()] * 120
    evenly = [(number + 0.4637) / 120 for number in range(120)]
    uniform_R = torch.tensor(evenly, dtype=torch.float64)
    tokens = sampling.draw(logits_RV, columns(draws), uniform_R, is_ranked=True).tolist()
    assert draw_tokens(library, logits_RV, draws, evenly) == tokens


def is_at_an_edge(logits_V: torch.Tensor, params: SamplingParams, uniform: float) -> bool:
    """Whether the uniform is so close to a cumulative probability that rounding decides."""
    below_V = (logits_V - logits_V.max()) / params.temperature
    below_V[below_V.exp() < params.min_p] = -math.inf
    return bool(((below_V.softmax(-1).cumsum(-1) - uniform).abs() < 1e-14).any())


def test_rows_with_nan_or_infinity_or_no_allowed_token_draw_none(library):
    logits_RV = torch.zeros(4, 40, dtype=torch.float64)
    logits_RV[0, 33], logits_RV[1, 33], logits_RV[2] = math.nan, math.inf, -math.inf
    assert draw_tokens(library, logits_RV, [SamplingParams().draw()] * 4, [0.5] * 4) == [*[NO_TOKEN] * 3, 20]


def test_the_largest_uniform_draws_the_last_possible_token(library):
    logits_RV = torch.tensor([[0.0, 0.0, 0.0, -math.inf]], dtype=torch.float64)
    assert draw_tokens(library, logits_RV, [SamplingParams().draw()], [1 - 2.0**-53]) == [2]


def test_top_k_keeps_the_first_of_equal_tokens_at_any_position(library):
    for vocab_size in range(9, 40):
        logits_RV = torch.full((200, vocab_size), -9.0, dtype=torch.float64)
        logits_RV[:, 1] = 0.0
        logits_RV[:, 3] = logits_RV[:, -1] = -torch.linspace(0.1, 2, 200, dtype=torch.float64)
        draws = [SamplingParams(top_k=2).draw()] * 200
        assert vocab_size - 1 not in draw_tokens(library, logits_RV, draws, [0.99] * 200)
