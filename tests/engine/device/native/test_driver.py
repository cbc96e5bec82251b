"""The native headers where Python cannot take them: NEON under emulation, and every build under sanitizers."""

import hashlib
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from platformdirs import user_cache_path

from nvium_core import NviumForCausalLM, SamplingParams
from nvium_core.bench.shapes import force_routing
from nvium_core.engine.device import native
from nvium_core.engine.device.junction import Junctions
from nvium_core.engine.device.layers.backend import LayersBackend
from nvium_core.engine.device.native.instructions import FLAGS
from nvium_core.engine.device.native.library import FOLDER, HEADERS
from nvium_core.engine.device.native.steps import GOES_ON
from nvium_core.engine.device.paged_cache import PagedCache
from nvium_core.engine.schedule.kv_cache import slots
from nvium_core.engine.schedule.sequence import Sequence
from nvium_core.engine.schedule.step import Run, Step
from nvium_core.model.quantized import quantize_model
from tests.engine.cached_blocks import NUM_PAGES
from tests.engine.device.native.image import Program, Ran
from tests.random_models import random_model

DRIVER = Path(__file__).parent / "driver.cpp"
KEPT: list[dict[str, Any]] = [{}, {"top_p": 0.9}, {"top_k": 3}, {"top_k": 5, "top_p": 0.6}]
SANITIZERS = "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-O1", "-g"
VECTOR_BYTES = {"baseline": 16, "avx2": 32, "avx512": 64, "neon": 16}
LENGTHS, NUM_TOP = (1, 17, 40), 4

WEIGHTS = "float32", "bfloat16", "q8", "q4"


def driver(compiler: str, *flags: str) -> Path:
    """Compiled, once for the same sources; whole when it gets its name, as tests run side by side."""
    if shutil.which(compiler) is None:
        pytest.skip(f"no {compiler} here")
    sources = b"".join((FOLDER / name).read_bytes() for name in HEADERS) + DRIVER.read_bytes()
    digest = hashlib.sha256(sources + " ".join((compiler, *flags)).encode()).hexdigest()[:16]
    folder = user_cache_path("nvium") / "tests"
    folder.mkdir(parents=True, exist_ok=True)
    made = folder / f"driver-{digest}"
    if not made.exists():
        command = [compiler, "-std=c++20", "-pthread", "-Wno-psabi", f"-I{FOLDER}", *flags, str(DRIVER)]
        begun = made.with_suffix(f".{os.getpid()}")
        subprocess.run([*command, "-o", str(begun)], check=True)
        begun.replace(made)
    return made


def model_with(weights: str) -> NviumForCausalLM:
    model = random_model(
        [1, 2, 3],
        dtype=torch.float32,
        width=96,
        num_heads=3,
        num_key_heads=1,
        vocab_size=70,
        qkv_bias=True,
        qk_norm=True,
    )
    force_routing(model, (0.4, 0.3, 0.3))
    if weights == "bfloat16":
        model.bfloat16().float()
    elif weights != "float32":
        quantize_model(model, weights)  # type: ignore[arg-type]
    return model


def drawing_sequences() -> list[Sequence]:
    pages = iter(torch.randperm(NUM_PAGES, generator=torch.Generator().manual_seed(0)).tolist())
    made = []
    for number, length in enumerate(LENGTHS):
        tokens = [(7 * number + 3 * t) % 17 for t in range(length)]
        params = SamplingParams(**KEPT[number % len(KEPT)])
        sequence = Sequence(str(number), tokens, params, seed=number + 3, num_blocks=3, arrival=number)
        sequence.seat = number
        sequence.pages = [next(pages) for _ in range(-(-length // 16))]
        made.append(sequence)
    return made


def cache_for(model: NviumForCausalLM) -> PagedCache:
    return PagedCache(model.config, num_pages=NUM_PAGES, page_size=16, like=model.lm_head.weight)


@torch.inference_mode()
def by_layers(model: NviumForCausalLM) -> Ran:
    """The same by PyTorch's layers."""
    cache, sequences = cache_for(model), drawing_sequences()
    backend = LayersBackend(model, cache)
    junctions = Junctions(model, backend, max_sequences=8)
    left, outcomes = dict.fromkeys(sequences, 0.0), dict[Sequence, tuple[int, int]]()
    for block in range(3):
        backend.run(Step(block, [Run(s, range(s.num_tokens), reaches_front=False) for s in sequences]))
        last = [slot for s in left for slot in slots(s, range(s.num_tokens - 1, s.num_tokens), 16)]
        decided = junctions.decide(block, left, last) if left else {}
        emitted = {s: GOES_ON if d.token_id is None else d.token_id for s, d in decided.items()}
        outcomes |= {sequence: (block, token) for sequence, token in emitted.items()}
        left = {s: 0.0 for s, token in emitted.items() if token == GOES_ON}
    every = [slot for s in sequences for slot in slots(s, range(s.num_tokens), 16)]
    scores = backend.score(every, [(7 * slot) % 17 for slot in every], [NUM_TOP] * len(every))
    top = [[token for token, _ in score.top] for score in scores]
    exit_probabilities = [list(score.exit_probabilities) for score in scores]
    emissions = [outcomes[sequence] for sequence in sequences]
    return Ran(cache.states_NSD, emissions, [score.logprob for score in scores], top, exit_probabilities)


def check(command: list[str], vector_bytes: int, weights: str, folder: Path) -> None:
    """What the driver finds with one thread and with three is the layers'."""
    model = model_with(weights)
    program = Program(model, cache_for(model), drawing_sequences(), NUM_TOP, vector_bytes)
    expected, file, found = by_layers(model), folder / "image", []
    for num_threads in (1, 3):
        file.write_bytes(program.written(num_threads))
        subprocess.run([*command, str(file)], check=True)
        found.append(program.read(file.read_bytes()))
    for ran in found:
        torch.testing.assert_close(ran.states, expected.states, rtol=0, atol=1e-4)
        assert ran.emissions == expected.emissions
        assert ran.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
        assert ran.top == expected.top
        assert ran.exit_probabilities == [pytest.approx(p_E, abs=1e-4) for p_E in expected.exit_probabilities]
    assert torch.equal(found[0].states, found[1].states)
    assert found[0][1:] == found[1][1:]


@pytest.mark.parametrize("weights", WEIGHTS)
def test_neon_computes_what_the_layers_do(weights: str, tmp_path: Path) -> None:
    if shutil.which("qemu-aarch64") is None:
        pytest.skip("no qemu-aarch64 here")
    emulated = ["qemu-aarch64", str(driver("aarch64-linux-gnu-g++", "-O2", "-static"))]
    check(emulated, VECTOR_BYTES["neon"], weights, tmp_path)


@pytest.mark.parametrize("instructions", ["baseline", "avx2", "avx512"])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_no_sanitizer_complains(instructions: str, weights: str, tmp_path: Path) -> None:
    if instructions not in native.available():
        pytest.skip(f"this processor has only {', '.join(native.available())}")
    made = driver("c++", *SANITIZERS, *FLAGS[instructions])
    check([str(made)], VECTOR_BYTES[instructions], weights, tmp_path)
