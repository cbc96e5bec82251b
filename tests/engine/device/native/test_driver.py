"""The native headers where Python cannot take them: NEON under emulation, and every build under sanitizers."""

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from platformdirs import user_cache_path

from nvium_core import NviumForCausalLM
from nvium_core.bench.shapes import force_routing
from nvium_core.choices import Instructions
from nvium_core.engine.device.layers.backend import LayersBackend
from nvium_core.engine.device.native.instructions import FLAGS
from nvium_core.engine.device.native.library import FOLDER
from nvium_core.engine.device.paged_cache import PagedCache
from nvium_core.engine.schedule.sequence import Sequence
from tests.engine.device.native.calls import assert_alike, cache_of, carry, one_of_each_kind, rows_of
from tests.engine.device.native.image import ReplayedBackend
from tests.random_models import random_model
from tests.rounded import round_to

DRIVER = Path(__file__).parent / "driver.cpp"
SANITIZERS = "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-O1", "-g"
VECTOR_BYTES = {"baseline": 16, "avx2": 32, "avx512": 64}
VOCAB_SIZE = 70

WEIGHTS = "float32", "bfloat16", "q8", "q4", "q4_1"


def driver(compiler: str, *flags: str) -> Path:
    """Compiled, once for the same sources; whole when it gets its name, as tests run side by side."""
    if shutil.which(compiler) is None:
        pytest.skip(f"no {compiler} here")
    sources = b"".join(file.read_bytes() for file in sorted(FOLDER.glob("*.h"))) + DRIVER.read_bytes()
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
        vocab_size=VOCAB_SIZE,
        qkv_bias=True,
        qk_norm=True,
    )
    force_routing(model, (0.4, 0.3, 0.3))
    if weights == "bfloat16":
        model.bfloat16().float()
    elif weights != "float32":
        round_to(model, weights)  # type: ignore[arg-type]
    return model


def check(command: list[str], instructions: Instructions, weights: str, file: Path) -> None:
    """What the driver finds with one thread and with three is the layers'."""
    model, found = model_with(weights), []
    plain = cache_of(model)
    sequences = sequences_of(plain)
    expected = carry(LayersBackend(model, plain), sequences, 40)
    for num_threads in (1, 3):
        cache = cache_of(model)
        backend = ReplayedBackend(model, cache, max_sequences=9, is_deterministic=True, instructions=instructions)
        backend.command, backend.file, backend.vector_bytes = command, file, VECTOR_BYTES[instructions]
        backend.num_threads = num_threads
        own = sequences_of(cache)
        found.append((carry(backend, own, 40), rows_of(cache, own)))
    for outcomes, rows in found:
        assert_alike(outcomes, expected, 1e-4)
        for some, others in zip(rows, rows_of(plain, sequences), strict=True):
            torch.testing.assert_close(some, others, rtol=0, atol=1e-4)
    assert found[0][0] == found[1][0]
    assert all(torch.equal(some, others) for some, others in zip(found[0][1], found[1][1], strict=True))


def sequences_of(cache: PagedCache) -> list[Sequence]:
    """Besides one of each kind, one whose logits are changed."""
    return one_of_each_kind(cache, VOCAB_SIZE, {"logit_bias": {3: 1.0}, "min_tokens": 1, "stop_token_ids": (4,)})


@pytest.mark.slow
@pytest.mark.parametrize("weights", WEIGHTS)
def test_neon_computes_what_the_layers_do(weights: str, tmp_path: Path) -> None:
    if shutil.which("qemu-aarch64") is None:
        pytest.skip("no qemu-aarch64 here")
    emulated = ["qemu-aarch64", str(driver("aarch64-linux-gnu-g++", "-O2", "-static"))]
    check(emulated, "baseline", weights, tmp_path / "image")  # vectors of the same width


@pytest.mark.slow
@pytest.mark.parametrize("weights", WEIGHTS)
def test_no_sanitizer_complains(instructions: Instructions, weights: str, tmp_path: Path) -> None:
    made = driver("c++", *SANITIZERS, *FLAGS[instructions])
    check([str(made)], instructions, weights, tmp_path / "image")
