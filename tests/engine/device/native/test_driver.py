"""The C++ outside Python: NEON under emulation, and every build under sanitizers."""

import shutil
from pathlib import Path

import pytest
import torch

from nvium_core import EngineConfig, NviumForCausalLM
from nvium_core.bench.shapes import force_routing
from nvium_core.choices import Instructions
from nvium_core.engine.device.layers import LayersBackend
from nvium_core.engine.device.native.library import FLAGS
from nvium_core.engine.device.paged_cache import PagedCache
from nvium_core.engine.schedule.sequence import Sequence
from tests.engine.device.native.calls import assert_alike, cache_of, carry, native_rows_of, one_of_each_kind, rows_of
from tests.engine.device.native.compiling import compiled
from tests.engine.device.native.image import ReplayedBackend
from tests.random_models import random_model
from tests.rounded import round_to

SANITIZERS = "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-O1", "-g"
VECTOR_BYTES = {"baseline": 16, "avx2": 32, "avx512": 64}
VOCAB_SIZE = 70

WEIGHTS = "float32", "bfloat16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K", "Q5_K"


def model_with(weights: str) -> NviumForCausalLM:
    width, num_heads = (256, 4) if weights.endswith("_K") else (96, 3)
    shape = {"width": width, "num_heads": num_heads, "num_key_heads": 1, "vocab_size": VOCAB_SIZE}
    model = random_model([1, 2, 3], dtype=torch.float32, **shape, qkv_bias=True, qk_norm=True)
    force_routing(model, (0.4, 0.3, 0.3))
    if weights == "bfloat16":
        model.bfloat16().float()
    elif weights != "float32":
        round_to(model, weights)
    return model


def check(command: list[str], instructions: Instructions, weights: str, file: Path) -> None:
    """Check that the driver computes what the layers compute, with one thread and with three."""
    model, found = model_with(weights), []
    tolerance = 3e-3 if weights.startswith("Q") else 1e-4  # rounding enlarges differences in the last bits
    plain = cache_of(model)
    sequences = sequences_of(plain)
    expected = carry(LayersBackend(model, plain), sequences, 40)
    for num_threads in (1, 3):
        cache = cache_of(model)
        backend = ReplayedBackend(
            model, cache, EngineConfig(max_sequences=9, deterministic=True, instructions=instructions)
        )
        backend.command, backend.file, backend.vector_bytes = command, file, VECTOR_BYTES[instructions]
        backend.num_threads = num_threads
        own = sequences_of(cache)
        found.append((carry(backend, own, 40), native_rows_of(cache, own)))
    for outcomes, rows in found:
        assert_alike(outcomes, expected, tolerance)
        for some, others in zip(rows, rows_of(plain, sequences), strict=True):
            torch.testing.assert_close(some, others, rtol=0, atol=tolerance)
    assert found[0][0] == found[1][0]
    assert all(torch.equal(some, others) for some, others in zip(found[0][1], found[1][1], strict=True))


def sequences_of(cache: PagedCache) -> list[Sequence]:
    return one_of_each_kind(cache, VOCAB_SIZE, {"logit_bias": {3: 1.0}, "min_tokens": 1, "stop_token_ids": (4,)})


@pytest.mark.slow
@pytest.mark.parametrize("weights", WEIGHTS)
def test_neon_computes_what_the_layers_compute(weights, tmp_path):
    compiler, emulator = "aarch64-linux-gnu-g++", "qemu-aarch64"
    if shutil.which(compiler) is None or shutil.which(emulator) is None:
        pytest.skip(f"no {compiler} or {emulator} here")
    command = [emulator, str(compiled("driver.cpp", compiler, "-O2", "-static"))]
    check(command, "baseline", weights, tmp_path / "image")  # same vector width as NEON


@pytest.mark.slow
@pytest.mark.parametrize("weights", WEIGHTS)
def test_sanitizers_report_no_error(instructions, weights, tmp_path):
    program = compiled("driver.cpp", "c++", *SANITIZERS, *FLAGS[instructions])
    check([str(program)], instructions, weights, tmp_path / "image")
