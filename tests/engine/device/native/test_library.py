import ctypes
import logging
import subprocess
import time
from collections.abc import Iterator

import pytest
import torch

from nvium_core import Engine, EngineConfig, InvalidRequest, SamplingParams
from nvium_core.engine.device import processor
from nvium_core.engine.device.native import library, weights
from nvium_core.engine.device.native.weights import Packer
from nvium_core.engine.events import Completion
from tests.engine.device.native.compiling import needs_compiler
from tests.limits import no_more_memory_than
from tests.random_models import random_model

MANY_ROWS = 16_384
"""Rows of a pass that needs 64 MiB for the inner rows of an MLP alone, more than glibc keeps when memory is freed."""


def tokens_and_exits(completions: list[Completion]) -> list[tuple[list[int], list[int]]]:
    return [(completion.token_ids, completion.exits) for completion in completions]


@pytest.mark.slow
@needs_compiler
def test_a_compiled_library_is_reused(tmp_path, monkeypatch):
    file = library.build("avx2", tmp_path)
    ctypes.CDLL(str(file))
    assert {each.suffix for each in tmp_path.iterdir()} == {".so", ".lock"}
    monkeypatch.setattr(library, "COMPILER", ("false",))
    monkeypatch.setattr(library, "file_name", lambda instructions: file.name)
    assert library.build("avx2", tmp_path) == file


def test_a_library_is_named_after_its_sources_flags_and_processor(tmp_path, monkeypatch):
    names = {library.file_name("avx2"), library.file_name("avx512"), library.file_name("baseline")}
    for file in (library.FOLDER / library.SOURCE, *library.FOLDER.glob("*.h")):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "draw.h").write_text("// other\n")
    monkeypatch.setattr(library, "FOLDER", tmp_path)
    names.add(library.file_name("avx2"))
    monkeypatch.setattr(library, "COMPILER", ("c++", "-O1"))
    names.add(library.file_name("avx2"))
    assert len(names) == 5


@pytest.fixture
def no_library_yet() -> Iterator[None]:
    library.native_library.cache_clear()
    yield
    library.native_library.cache_clear()


@pytest.mark.usefixtures("no_library_yet")
@pytest.mark.parametrize(
    ("compiler", "cause"),
    [
        (("no-such-compiler",), "no C++ compiler (no-such-compiler) on PATH"),
        (("false",), "returned non-zero"),
        (("sh", "-c", "seq 300 >&2; echo 'error: odd' >&2; false"), "run: error: odd"),
    ],
)
def test_without_a_compiler_the_layers_run_after_a_line_and_one_warning(tmp_path, monkeypatch, caplog, compiler, cause):
    model, prompts = random_model([1, 2]), [[1, 2, 3], [4]]
    params = SamplingParams(max_tokens=8, seed=3, ignore_eos=True)
    expected = tokens_and_exits(Engine(model).generate(prompts, params))
    monkeypatch.setattr(library, "COMPILER", compiler)
    monkeypatch.setattr(library, "user_cache_path", lambda name: tmp_path)
    library.native_library.cache_clear()
    with caplog.at_level(logging.INFO):
        assert tokens_and_exits(Engine(model).generate(prompts, params)) == expected
    lines = "compiling C++ kernels", "no native layers"
    _, warning = (message for message in caplog.messages if message.startswith(lines))
    assert cause in warning and "\n" not in warning
    assert not weights.supports(model)
    assert list(tmp_path.glob("*.so")) == []


@pytest.mark.usefixtures("no_library_yet")
def test_a_read_only_cache_is_not_fatal(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setattr(library, "user_cache_path", lambda name: file / "below")
    assert library.native_library(processor.instructions()) is None


@needs_compiler
def test_a_native_call_without_memory_is_a_memory_error():
    model = random_model([1], width=256, context=MANY_ROWS + 1)
    engine = Engine(model, EngineConfig(max_sequences=1, max_rows_per_step=MANY_ROWS))
    with no_more_memory_than(16 << 20), pytest.raises(MemoryError) as raised:
        engine.generate([[1] * MANY_ROWS], SamplingParams(max_tokens=1))
    assert raised.traceback[-1].name == library.check_result.__name__


@needs_compiler
def test_threads_that_cannot_start_are_an_error_with_the_systems_words():
    compiled = library.native_library(processor.instructions())
    assert compiled is not None
    time.sleep(0.3)  # after stalls the pool uses no other thread for 0.2 s
    with no_more_memory_than(64 << 20), pytest.raises(OSError, match=r"^cannot start a thread: Resource temporarily"):
        Packer(compiled, 1000, 0).pack(torch.ones(1024, 32))


@pytest.mark.slow
@needs_compiler
def test_the_sources_compile_without_warnings(tmp_path):
    source = str(library.FOLDER / library.SOURCE)
    command = [*library.COMPILER, "-Wall", "-Wextra", source, "-o", str(tmp_path / "out")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stderr == ""


def test_auto_is_the_widest_available_instruction_set_within_the_limit():
    *narrower, widest = processor.available()
    assert processor.instructions() == widest == processor.instructions("auto")
    try:
        for name in narrower:
            processor.use_processor(name, "auto")
            assert processor.instructions() == name
    finally:
        processor.use_processor("auto", "auto")
    assert processor.instructions() == widest


@pytest.mark.parametrize("name", ["neon", "avx2", "avx512", "baseline"])
def test_instructions_that_the_processor_lacks_are_rejected(name):
    if name in processor.available():
        assert processor.instructions(name) == name
    else:
        with pytest.raises(InvalidRequest, match=f"^instructions: .*{name}"):
            Engine(random_model([1]), EngineConfig(instructions=name))
