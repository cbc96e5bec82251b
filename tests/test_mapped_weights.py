"""Models served on a CPU have memory-mapped weights that equal those of `load_model` bit for bit."""

import logging
import os
from pathlib import Path

import pytest
import torch
from torch import nn

from nvium_core import load_mapped, load_model, mapped_weights
from nvium_core.checksums import CHECKSUMS_FILE
from nvium_core.choices import Precision, Weights
from nvium_core.conversion import convert
from nvium_core.engine.device.native.weights import is_plain
from nvium_core.loading import LoadedModel
from nvium_core.mapped_weights import GROUPS_FILE, WEIGHTS_FILE, unmapped_bytes
from nvium_core.model.quantized import groups_of
from tests.full_disk import no_file_larger_than
from tests.model.gguf_files import write_gguf
from tests.model.test_backbones import random_model
from tests.test_gguf_conversion import FIELDS, SHAPE, TEXT

WIDE = SHAPE | {"hidden_size": 64, "intermediate_size": 64}
Q4_1, Q8_0, BF16, FOLDER = "model.Q4_1.gguf", "model.Q8_0.gguf", "model.BF16.gguf", "folder"
IN_MEMORY: list[tuple[str, Precision, Weights]] = [
    (Q4_1, "auto", "auto"),
    (Q4_1, "float32", "auto"),
    (Q8_0, "auto", "auto"),
    (FOLDER, "float32", "auto"),
    (FOLDER, "auto", "q8"),
    (BF16, "auto", "q4"),
]
"""Loads whose weights differ from the source file."""

pytestmark = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="the system does not list memory maps")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One random model as several GGUF files and as a bfloat16 folder."""
    place = tmp_path_factory.mktemp("sources")
    for kind in ("Q4_1", "Q8_0", "BF16"):
        write_gguf(place / f"model.{kind}.gguf", random_model("llama", WIDE), kind, tokenizer=FIELDS)
    convert(place / BF16, place / FOLDER, "bfloat16")
    return place


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(mapped_weights, "user_cache_path", lambda name: tmp_path)
    monkeypatch.setattr(mapped_weights, "MIN_BYTES", 0)
    return tmp_path


def cached(cache: Path) -> list[Path]:
    return [folder for folder in cache.glob("weights/*/*") if folder.is_dir()]


def not_loaded(*given: object, **more: object) -> LoadedModel:
    raise AssertionError("read from its source again")


@pytest.mark.parametrize(("source", "dtype", "weights"), IN_MEMORY)
def test_weights_are_written_once_and_mapped_and_equal_bit_for_bit(source, dtype, weights, sources, cache, monkeypatch):
    plain = load_model(str(sources / source), "cpu", dtype, weights=weights)
    first = load_mapped(str(sources / source), "cpu", dtype, weights)
    monkeypatch.setattr(mapped_weights, "load_model", not_loaded)
    for mapped in (first, load_mapped(str(sources / source), "cpu", dtype, weights)):
        assert unmapped_bytes(plain.model) > 0 == unmapped_bytes(mapped.model)
        assert mapped.name == plain.name
        assert mapped.model.dtype == plain.model.dtype
        assert is_plain(mapped.model)
        assert mapped.tokenizer(TEXT).input_ids == plain.tokenizer(TEXT).input_ids
        assert mapped.tokenizer.chat_template == plain.tokenizer.chat_template
        for layer, theirs in zip(mapped.model.modules(), plain.model.modules(), strict=True):
            assert groups(layer) == groups(theirs)
        for (name, weight), (_, theirs) in zip(
            mapped.model.state_dict().items(), plain.model.state_dict().items(), strict=True
        ):
            assert torch.equal(weight, theirs), name
    assert len(cached(cache)) == 1


def groups(layer: nn.Module) -> object:
    found = groups_of(layer) if isinstance(layer, nn.Linear) else None
    parts = found and (found.numbers_ND, found.scales_NG, found.minima_NG)
    return found and (found.kind, [part is not None and part.tolist() for part in parts])


def test_small_models_stay_in_memory(sources, cache, monkeypatch):
    monkeypatch.setattr(mapped_weights, "MIN_BYTES", 2**20)
    assert unmapped_bytes(load_mapped(str(sources / Q4_1), "cpu").model) > 0
    assert not cached(cache)


def test_a_changed_source_replaces_its_cached_weights_and_idle_models_are_removed(sources, cache):
    load_mapped(str(sources / Q4_1), "cpu")
    load_mapped(str(sources / Q4_1), "cpu", "float32")
    before = set(cached(cache))
    os.utime(sources / Q4_1)
    load_mapped(str(sources / Q4_1), "cpu")
    assert len(before) == 2 == len(cached(cache))
    assert {folder.name for folder in before & set(cached(cache))} == {
        folder.name for folder in before if folder.name.startswith("float32")
    }
    idle = cached(cache)
    for folder in idle:
        os.utime(folder, (0, 0))
    load_mapped(str(sources / FOLDER), "cpu", "float32")
    assert len(cached(cache)) == 1
    assert cached(cache)[0] not in idle


def flipped(whole: bytes) -> bytes:
    return whole[:-1] + bytes([whole[-1] ^ 0x80])


@pytest.mark.parametrize("damage", [lambda whole: whole[:-100], flipped, lambda _: b""])
@pytest.mark.parametrize(("source", "file"), [(Q4_1, WEIGHTS_FILE), (Q8_0, GROUPS_FILE), (Q8_0, CHECKSUMS_FILE)])
def test_a_damaged_model_is_written_again(sources, cache, caplog, source, file, damage):
    load_mapped(str(sources / source), "cpu")
    [folder] = cached(cache)
    (folder / file).write_bytes(damage((folder / file).read_bytes()))
    assert unmapped_bytes(load_mapped(str(sources / source), "cpu").model) == 0
    assert str(folder) in caplog.text
    assert cached(cache) == [folder]


def test_weights_stay_in_memory_if_the_disk_is_full(sources, cache, caplog):
    caplog.set_level(logging.INFO)
    with no_file_larger_than(10_000):
        loaded = load_mapped(str(sources / Q4_1), "cpu")
    assert unmapped_bytes(loaded.model) > 0
    assert "stay in memory" in caplog.text
    assert not cached(cache)
