"""What only a GPU can show. All of it: `python -m pytest -m cuda`."""

import warnings
from functools import partial

import pytest
import torch

from nvium_core import Engine, EngineConfig, SamplingParams
from nvium_core.engine.device.attention import gathered, in_place
from nvium_core.engine.device.graphs.replay import Replay
from nvium_core.engine.schedule import randomness
from nvium_core.model import reference
from tests.engine.cached_blocks import TOLERANCE, assert_alike, carry_five_by_five, sequences_of
from tests.engine.device.graphs.engines import Cached, backend_of
from tests.random_models import random_model

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")]

PROMPTS = [[1, 2, 3], [4, 5], [6] * 20]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("wishes", [{}, {"top_k": 4, "top_p": 0.8}, {"temperature": 0.0}, {"repetition_penalty": 1.3}])
def test_tokens_and_exits_equal_algorithm_1_in_float64(wishes: dict[str, float], deterministic: bool) -> None:
    model = random_model([1, 2, 4], seed=5)
    engine = Engine(random_model([1, 2, 4], seed=5).cuda(), EngineConfig(max_sequences=3, deterministic=deterministic))
    params = SamplingParams(max_tokens=20, seed=11, ignore_eos=True, **wishes)
    asked = reference.Params(stop_token_ids=set(), **wishes)
    for prompt, told in zip(PROMPTS, engine.generate(PROMPTS, params), strict=True):
        spoken = reference.sample(model, prompt, 20, partial(randomness.uniform, 11, 0), asked)
        assert list(zip(told.token_ids, told.exits, strict=True)) == [(s.token_id, s.exit) for s in spoken]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("page_size", [16, 256])
def test_static_blocks_are_the_layers(dtype: torch.dtype, page_size: int) -> None:
    model = random_model([1, 3], dtype=dtype, spread=0.5, width=64).cuda()
    sequences = sequences_of([1, 17, 40], model.config.vocab_size, page_size)
    plain, graphs = Cached(model, False, page_size), Cached(model, True, page_size)
    is_kernels = dtype == torch.bfloat16 and page_size == 256
    assert graphs.graphs.attention is (in_place if is_kernels else gathered)
    carry_five_by_five(sequences, [plain, graphs])
    assert_alike(graphs, plain, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_graphs_leave_what_their_functions_leave(dtype: torch.dtype) -> None:
    model = random_model([1, 3], dtype=dtype, spread=0.5, width=64).cuda()
    sequences = sequences_of([9, 17, 40], model.config.vocab_size)
    replayed, called = Cached(model, has_graphs=True), Cached(model, has_graphs=True)
    called.graphs.replay = Replay(torch.device("cpu"))
    for start in range(0, 9, 3):
        for block in range(2):
            rows = [range(start, start + 3) for _ in sequences]
            for cached in (replayed, called):
                cached.carry(block, sequences, rows)
    assert replayed.graphs.replay.graphs
    assert None not in replayed.graphs.replay.graphs.values()
    for expected, found in zip(called.kept, replayed.kept, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("num_sequences", [1, 5])
def test_a_decoding_step_waits_for_the_device_once(num_sequences: int) -> None:
    model = random_model([1, 2, 4], dtype=torch.bfloat16, width=64).cuda()
    engine = Engine(model, EngineConfig(max_sequences=num_sequences))
    engine.calibrate()
    for number in range(num_sequences):
        engine.add(str(number), [1, 2, 3], SamplingParams(max_tokens=40, seed=number, ignore_eos=True))
    for _ in range(10):
        engine.step()
    graphs = backend_of(engine).replay.graphs
    assert graphs
    assert None not in graphs.values()
    for _ in range(20):
        num_graphs = len(graphs)
        with warnings.catch_warnings(record=True) as waits:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                engine.step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        if len(graphs) == num_graphs:
            assert [str(wait.message) for wait in waits if "synchroniz" in str(wait.message)][1:] == []
