"""What is to be shown on a GPU: `python -m pytest -m cuda`. What a CPU can do of it is done there too."""

import warnings
from functools import partial
from inspect import signature
from itertools import product, takewhile
from typing import Any

import pytest
import torch
from torch.nn.attention.varlen import varlen_attn

from nvium_core import Completion, Engine, EngineConfig, NviumConfig, NviumForCausalLM, SamplingParams
from nvium_core.bench.random_folder import LLAMA_3_2_1B
from nvium_core.engine.device.attention import gathered, ragged, ragged_in_place
from nvium_core.engine.device.graphs.replay import Replay
from nvium_core.engine.device.layers.backend import LayersBackend
from nvium_core.engine.device.layers.fixed_order import FixedOrderBackend
from nvium_core.engine.device.runner import Runner
from nvium_core.engine.schedule import randomness
from nvium_core.engine.schedule.policies.whole_pass import WholePass
from nvium_core.engine.schedule.step import Run, Step
from nvium_core.model import reference
from tests.engine.cached_blocks import TOLERANCE, assert_alike, carry_five_by_five, sequences_of
from tests.engine.device.graphs.engines import Cached, backend_of, graphs_engine
from tests.engine.driving import Key, drained
from tests.random_models import random_model

GPU = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")]
on_a_gpu = pytest.mark.parametrize("device", [pytest.param("cuda", marks=GPU)])
anywhere = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])

PROMPTS = [[1, 2, 3], [4, 5], [6] * 20]
WISHES: list[dict[str, Any]] = [{}, {"top_k": 4, "top_p": 0.8}, {"temperature": 0.0}, {"repetition_penalty": 1.3}]


def engine_on(device: str, model: NviumForCausalLM, config: EngineConfig) -> Engine:
    """As it is made for a GPU; on a CPU, graphs are just called."""
    if device == "cuda":
        return Engine(model, config)
    if config.deterministic:
        return Engine(model, config, make_runner=partial(Runner, make_backend=FixedOrderBackend))
    return graphs_engine(model, config)


@anywhere
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("wishes", WISHES)
def test_tokens_and_exits_equal_algorithm_1_in_float64(
    wishes: dict[str, Any], deterministic: bool, device: str
) -> None:
    model, config = random_model([1, 2, 4], seed=5), EngineConfig(max_sequences=3, deterministic=deterministic)
    engine = engine_on(device, random_model([1, 2, 4], seed=5).to(device), config)
    params = SamplingParams(max_tokens=20, seed=11, ignore_eos=True, **wishes)
    asked = reference.Params(stop_token_ids=set(), **wishes)
    for prompt, told in zip(PROMPTS, engine.generate(PROMPTS, params), strict=True):
        spoken = reference.sample(model, prompt, 20, partial(randomness.uniform, 11, 0), asked)
        assert list(zip(told.token_ids, told.exits, strict=True)) == [(s.token_id, s.exit) for s in spoken]


@anywhere
@torch.inference_mode()
def test_greedy_tokens_are_the_mixture_s_argmax_though_some_leave_early(device: str) -> None:
    model = random_model([1, 2, 4], seed=5, spread=2.0).to(device)
    engine = engine_on(device, model, EngineConfig(max_sequences=3))
    answers = engine.generate(PROMPTS, SamplingParams(max_tokens=20, temperature=0, ignore_eos=True))
    for prompt, told in zip(PROMPTS, answers, strict=True):
        tokens = torch.tensor([[*prompt, *told.token_ids]], device=device)
        most_probable = model(tokens[:, :-1]).logits[0, len(prompt) - 1 :].argmax(-1)
        assert most_probable.tolist() == told.token_ids
    assert {exit_ for told in answers for exit_ in told.exits} > {3}


@anywhere
@pytest.mark.parametrize("num_sequences", [1, 4, 16, 64])
def test_an_answer_does_not_depend_on_its_company_in_bfloat16(num_sequences: int, device: str) -> None:
    model = random_model([1, 2, 4], dtype=torch.bfloat16, width=64).to(device)
    answers = answers_of(engine_on(device, model, EngineConfig(max_sequences=num_sequences, deterministic=True)))
    alone = answers_of(engine_on(device, model, EngineConfig(max_sequences=1, deterministic=True)))
    assert answers == alone


def answers_of(engine: Engine) -> dict[Key, Completion]:
    """Of 64 requests of several kinds, as many at once as there are seats."""
    for number in range(64):
        prompt = [(number + 5 * t) % 17 for t in range(1 + number % 23)]
        wishes = {**WISHES[number % len(WISHES)], "logprobs": 1 if number % 3 == 0 else None}
        engine.add(str(number), prompt, SamplingParams(max_tokens=6, seed=number, ignore_eos=True, **wishes))
    return drained(engine)


@anywhere
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_passes_that_are_launched_ahead_answer_as_the_layers_do(dtype: torch.dtype, device: str) -> None:
    model = random_model([1, 2, 4], seed=5, dtype=dtype, spread=0.5, width=64).to(device)
    config = EngineConfig(schedule="synchronous", max_sequences=8)
    engine = engine_on(device, model, config)
    found = plain_answers(engine)
    expected = plain_answers(Engine(model, config, make_runner=partial(Runner, make_backend=LayersBackend)))
    assert backend_of(engine).passes.num_ahead > 10
    num_alike = 0
    for key, told in expected.items():
        pairs = [list(zip(each.token_ids, each.exits, strict=True)) for each in (told, found[key])]
        alike = len(list(takewhile(lambda both: both[0] == both[1], zip(*pairs, strict=True))))
        near = pytest.approx(found[key].exit_probabilities[:alike], abs=TOLERANCE[dtype])
        assert told.exit_probabilities[:alike] == near
        num_alike += alike
    assert num_alike >= 8 * (24 if dtype == torch.float64 else 4)


def plain_answers(engine: Engine) -> dict[Key, Completion]:
    for number in range(8):
        prompt = [(number + 5 * t) % 17 for t in range(1 + number)]
        engine.add(str(number), prompt, SamplingParams(max_tokens=24, seed=number, ignore_eos=True))
    return drained(engine)


@anywhere
@torch.inference_mode()
def test_prompts_of_many_rows_are_read_in_place_as_they_are_gathered(device: str) -> None:
    model = random_model([1, 3], dtype=torch.bfloat16, spread=0.5, width=64, context=512).to(device)
    sequences = sequences_of([400, 150], model.config.vocab_size, 256)
    gathering, in_place = Cached(model, False, 256), Cached(model, True, 256)
    for block, rows in product(range(2), ([range(130), range(70)], [range(130, 400), range(70, 150)])):
        step = Step(block, [Run(sequence, own, False) for sequence, own in zip(sequences, rows, strict=True)])
        assert in_place.graphs.parts(step.runs) == []
        for each in (gathering, in_place):
            each.backend.run(step)
    assert_alike(in_place, gathering, TOLERANCE[torch.bfloat16])
    takes_tables = device == "cuda" and "block_table" in signature(varlen_attn).parameters
    assert in_place.graphs.attend_runs is (ragged_in_place if takes_tables else ragged)


@anywhere
def test_an_engine_answers_as_before_beside_another_of_the_same_model(device: str) -> None:
    model, config = random_model([1, 2, 4], seed=5, width=64).to(device), EngineConfig(max_sequences=8)
    first = engine_on(device, model, config)
    before = plain_answers(first)
    assert plain_answers(engine_on(device, model, config)) == before
    if device == "cuda":  # whoever takes memory that has been freed changes it
        torch.full((2**28,), torch.nan, device=device)
    assert plain_answers(first) == before


OWN_EXITS = {"adapter_hidden_size": None, "tie_word_embeddings": False, "max_position_embeddings": 2048}
LLAMA_1B = LLAMA_3_2_1B | OWN_EXITS | {"exit_layers": [4, 8, 16]}
LLAMA_TINY = LLAMA_1B | {"vocab_size": 5000, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}
LLAMA_TINY |= {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8, "exit_layers": [1, 2, 3]}


@anywhere
def test_a_model_of_1b_with_grouped_queries_and_a_large_vocabulary_keeps_to_its_memory(device: str) -> None:
    is_gpu = device == "cuda"
    with torch.device(device):
        model = NviumForCausalLM(NviumConfig(**(LLAMA_1B if is_gpu else LLAMA_TINY)))
    model = model.to(torch.bfloat16).eval()
    num_sequences = 64 if is_gpu else 4
    config = EngineConfig(schedule="synchronous", max_sequences=num_sequences, cache_tokens=num_sequences * 512)
    if is_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    weights = torch.cuda.memory_allocated() if is_gpu else 0
    engine = engine_on(device, model, config)
    engine.calibrate(max_seconds=5)
    engine.scheduler.policy = WholePass()
    prompts = [[(number + 5 * t) % 1000 for t in range(100)] for number in range(num_sequences)]
    answers = engine.generate(prompts, SamplingParams(max_tokens=32, seed=1, ignore_eos=True))
    assert [len(told.token_ids) for told in answers] == [32] * num_sequences
    assert backend_of(engine).passes.num_ahead > 20
    assert None not in backend_of(engine).replay.graphs.values()
    if is_gpu:
        taken = torch.cuda.max_memory_allocated() - weights
        assert taken <= engine.cache_size.num_bytes + engine.cache_size.seat_bytes + ACTIVATIONS


ACTIVATIONS = 2**30
"""Bytes that may be taken beside the cache and what is counted for seats."""


@on_a_gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("page_size", [16, 256])
def test_static_blocks_are_the_layers(dtype: torch.dtype, page_size: int, device: str) -> None:
    model = random_model([1, 3], dtype=dtype, spread=0.5, width=64).to(device)
    sequences = sequences_of([1, 17, 40], model.config.vocab_size, page_size)
    plain, graphs = Cached(model, False, page_size), Cached(model, True, page_size)
    is_kernels = dtype == torch.bfloat16 and page_size == 256
    assert (graphs.graphs.attention is not gathered) == is_kernels
    carry_five_by_five(sequences, [plain, graphs])
    assert_alike(graphs, plain, TOLERANCE[dtype])


@on_a_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_graphs_leave_what_their_functions_leave(dtype: torch.dtype, device: str) -> None:
    model = random_model([1, 3], dtype=dtype, spread=0.5, width=64).to(device)
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


@on_a_gpu
@pytest.mark.parametrize("num_sequences", [1, 5])
def test_a_decoding_step_waits_for_the_device_once(num_sequences: int, device: str) -> None:
    model = random_model([1, 2, 4], dtype=torch.bfloat16, width=64).to(device)
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
