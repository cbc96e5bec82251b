import os
import resource
from contextlib import suppress
from fractions import Fraction
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from nvium_core import Engine, EngineConfig, InvalidRequest
from nvium_core.engine.device import memory
from nvium_core.engine.device.memory import (
    PROCESS_BYTES,
    PROCESS_PAGES,
    cache_size,
    check_memory,
    control_groups,
    device_memory,
    free_memory,
    page_bytes,
    parse_cache_memory,
    seat_bytes,
)
from nvium_core.engine.device.paged_cache import PagedCache, cache_precision, zeros
from nvium_core.engine.device.sampling import draw
from nvium_core.engine.sampling_params import Draw
from nvium_core.model.nvium import Nvium
from nvium_core.model.stored import StoredMatrix
from tests.engine.driving import columns
from tests.limits import limited
from tests.model.gguf_files import write_gguf
from tests.model.test_backbones import random_model as random_backbone
from tests.model.test_gguf import WIDE
from tests.random_models import random_model

CPU = torch.device("cpu")
UNITS = {
    "KB": 1000, "MB": 1000**2, "GB": 1000**3, "TB": 1000**4,
    "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3, "TiB": 1024**4,
}  # fmt: skip

numbers = st.decimals(0, 10_000, places=3, allow_nan=False, allow_infinity=False)
spaces = st.sampled_from(["", " "])


@given(numbers, st.sampled_from(sorted(UNITS)), spaces, st.booleans())
def test_a_size_is_its_number_times_its_unit(number, unit, space, is_upper):
    size = int(Fraction(str(number)) * UNITS[unit])
    assume(0 < size <= device_memory(CPU))
    assert parse_cache_memory(f"{number}{space}{unit.upper() if is_upper else unit}", CPU) == size


@given(st.integers(1, 10_000))
def test_a_share_is_of_the_devices_memory(hundredths):
    text = f"{hundredths // 100}.{hundredths % 100:02d}%"
    assert parse_cache_memory(text, CPU) == device_memory(CPU) * hundredths // 10_000


MALFORMED = ["", "lots", "12", "GB", "-1GB", "1e3MB", "1.GB", ".5GB", "1,5GB", "nan%", "1 2GB", "1GBit", "٣GB"]


@given(st.text("0123456789.% KMGTiB", max_size=9))
def test_any_text_is_a_size_within_the_device_or_refused(text):
    with suppress(InvalidRequest):
        assert 1 <= parse_cache_memory(text, CPU) <= device_memory(CPU)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *((text, "^cache_memory: must be a size such as") for text in (*MALFORMED, "9" * 5000 + "MB")),
        *((text, "zero") for text in ("0GB", "0.0MiB", "0%", "0.0001KB")),
        *((text, "at most") for text in ("100.1%", "1000%", "999999999TB")),
    ],
)
def test_a_malformed_size_and_one_of_zero_or_beyond_the_device_are_refused(text, message):
    with pytest.raises(InvalidRequest, match=message):
        parse_cache_memory(text, CPU)
    assert parse_cache_memory("100%", CPU) == device_memory(CPU)


def limit(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text + "\n")


def test_a_containers_limit_is_read_where_its_groups_are_mounted(tmp_path):
    assert list(control_groups(tmp_path, "0::/\n")) == []
    limit(tmp_path / "memory.max", "4096")
    assert list(control_groups(tmp_path, "0::/docker/0123abcd\n")) == [(4096, 0)]


def test_limits_of_enclosing_groups_count(tmp_path):
    limit(tmp_path / "outer" / "memory.max", "8192")
    limit(tmp_path / "outer" / "inner" / "memory.max", "max")
    limit(tmp_path / "elsewhere" / "memory.max", "1")
    assert list(control_groups(tmp_path, "0::/outer/inner\n")) == [(8192, 0)]


def test_limits_of_version_1_are_those_of_the_memory_controller(tmp_path):
    limit(tmp_path / "memory" / "group" / "memory.limit_in_bytes", "2048")
    limit(tmp_path / "memory" / "memory.limit_in_bytes", str(2**63 - 4096))
    limit(tmp_path / "memory" / "group" / "memory.usage_in_bytes", "1000")
    limit(tmp_path / "memory" / "group" / "memory.stat", "cache 300\ntotal_inactive_file 200\ntotal_active_file 100")
    limit(tmp_path / "cpu" / "memory.limit_in_bytes", "1")
    membership = "9:name=systemd:/group\n4:memory:/group\n1:cpu:/group\n"
    assert list(control_groups(tmp_path, membership)) == [(2048, 700), (2**63 - 4096, 0)]


def in_container(monkeypatch: pytest.MonkeyPatch, folder: Path, most: int, used: int, cached: int) -> None:
    for name, text in {"max": most, "current": used, "stat": f"anon 1\nactive_file 0\ninactive_file {cached}"}.items():
        limit(folder / f"memory.{name}", str(text))
    monkeypatch.setattr(memory, "CONTROL_GROUPS", folder)
    monkeypatch.setattr(memory, "membership", lambda: "0::/\n")


def test_files_in_the_page_cache_leave_memory_free(tmp_path, monkeypatch):
    in_container(monkeypatch, tmp_path, 2**20, 300_000, 200_000)
    assert free_memory() == (2**20 - 100_000, "the container's limit")
    monkeypatch.setattr(memory, "CONTROL_GROUPS", tmp_path / "none")
    free, whose = free_memory()
    assert 2**20 < free < device_memory(CPU) and whose == "the machine's"


@pytest.mark.parametrize("has_biases", [False, True])
def test_a_model_larger_than_the_free_memory_is_refused_before_it_is_packed(has_biases, tmp_path, monkeypatch):
    """The model with all biases runs through PyTorch's layers, which need its weights in float32."""
    model = random_backbone("llama", WIDE | {"attention_bias": has_biases, "intermediate_size": 4096})
    file = write_gguf(tmp_path / "model.gguf", model, "Q8_0")
    made = Nvium.from_pretrained(file, dtype=torch.float32, is_stored=True)
    in_container(monkeypatch, tmp_path, 2_000_000, 0, 0)
    with pytest.raises(InvalidRequest, match=r"model needs \d.*, 0.00 GB available \(the container's limit\); try"):
        Engine(made, EngineConfig(cache_tokens=64))
    assert any(isinstance(weight, StoredMatrix) for weight in made.parameters())


def test_the_process_counts_beside_weights_and_cache(tmp_path, monkeypatch):
    in_container(monkeypatch, tmp_path, PROCESS_BYTES + 3_000_000, 0, 0)
    check_memory(2_000_000, 1_000_000)
    expected = r"needs 0.30 GB \(weights 0.00 GB, cache 0.00 GB, process 0.30 GB\), 0.30 GB available"
    with pytest.raises(InvalidRequest, match=expected):
        check_memory(2_000_001, 1_000_000)


@pytest.mark.skipif(not PROCESS_PAGES.exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize(("kind", "option"), [(resource.RLIMIT_AS, "-v"), (resource.RLIMIT_DATA, "-d")])
def test_limits_of_the_process_count_and_a_cache_that_is_not_written_yet_counts_once(kind, option, monkeypatch):
    monkeypatch.setattr(memory, "membership", lambda: "")
    most = 2**40
    monkeypatch.setattr(memory, "MACHINE_MEMORY", PROCESS_PAGES.parent / "none")
    with limited(kind, most):
        before, whose = free_memory()
        cache = zeros(2**30)
        assert whose == f"the limit of ulimit {option}" and 0 < before < most
        assert device_memory(CPU) <= most
        assert before - free_memory()[0] >= 2**30 > before - free_memory(reserved=len(cache))[0]
        check_memory(before - len(cache) - PROCESS_BYTES - 2**28, len(cache))
        with pytest.raises(InvalidRequest, match=f"ulimit {option}"):
            check_memory(most, len(cache))


def test_the_default_cache_is_a_quarter_of_the_free_memory(tmp_path, monkeypatch):
    model = random_model([1, 2])
    in_container(monkeypatch, tmp_path, 2_000_000, 1_500_000, 100_000)
    size = cache_size(EngineConfig(max_sequences=4096), model.config, 4096, like=model.lm_head.weight)
    assert 0 < size.num_bytes <= 600_000 / 4


@pytest.mark.parametrize("choice", ["auto", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_and_values_have_the_precision_of_the_cache_and_pages_the_bytes_that_it_allocates(dtype, choice):
    model = random_model([1, 3], dtype=dtype)
    config, like = model.config, model.lm_head.weight
    caches = [PagedCache(config, num_pages=n, page_size=4, like=like, choice=choice) for n in (1, 2)]
    one, two = (sum(part.nbytes for part in vars(cache).values() if isinstance(part, Tensor)) for cache in caches)
    precision = dtype if choice == "auto" else getattr(torch, choice)
    assert two - one == page_bytes(config, 4, dtype, cache_precision(choice, like))
    assert {part.dtype for part in (caches[0].keys, caches[0].values)} == {precision}
    assert caches[0].states_NSD.dtype == dtype


@pytest.mark.parametrize("is_ranked", [False, True])
@torch.inference_mode()
def test_sampling_needs_no_more_memory_than_is_reserved(is_ranked):
    """Measured by the CPU's allocator."""
    logits_RV, one_R = torch.zeros(8, 4096, dtype=torch.bfloat16), torch.ones(8, dtype=torch.float64)
    draws = columns([Draw(log_min_p=-1.0, top_p=0.9)] * 8)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        draw(logits_RV, draws, one_R / 2, is_ranked=is_ranked)
    events = [each for each in profiled.profiler.kineto_results.events() if each.name() == "[memory]"]
    taken = accumulate(each.nbytes() for each in sorted(events, key=lambda each: each.start_ns()))
    counted = seat_bytes(random_model([1, 2], vocab_size=4096).config, 8)
    assert counted / 4 < max(taken) <= counted


def test_a_budget_below_one_page_is_refused():
    model = random_model([1, 2])
    page = page_bytes(model.config, 16, torch.float64, torch.float64)
    with pytest.raises(InvalidRequest, match="is too small for one page"):
        Engine(model, EngineConfig(cache_memory=f"{(page - 1) / 1000}KB"))
    assert Engine(model, EngineConfig(cache_memory=f"{2 * page / 1000}KB")).cache_size.num_bytes == 2 * page


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_cache_uses_memory_only_once_written():
    config = random_model([1, 2], width=64, num_heads=2).config
    before = resident()
    cache = PagedCache(config, num_pages=40_000, page_size=16, like=torch.empty(0))
    assert cache.keys.nbytes + cache.values.nbytes > 2**28
    assert resident() - before < 2**25
    assert not cache.keys[:, -1].any()
    cache.keys[0, : 2**16] = 1
    assert resident() - before > 2**24 - 2**22


def test_pages_of_a_cpu_are_small():
    assert cache_size(EngineConfig(), random_model([1]).config, 64, like=torch.empty(0)).page_size == 16
