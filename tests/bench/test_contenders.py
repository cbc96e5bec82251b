from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import torch

from nvium_core.bench.contenders import llama_cpp
from nvium_core.bench.contenders.contender import (
    Contender,
    ContenderFailed,
    Generation,
    NotAvailable,
    Workload,
    states,
    stolen_seconds,
    watched,
)
from nvium_core.bench.contenders.gguf_file import write_gguf
from nvium_core.bench.contenders.lineup import GIVEN_FILE, LLAMA_CPP, UNPACKED, Lineup, contender, engine_for, lineup
from nvium_core.bench.contenders.llama_cpp import Library, builds
from nvium_core.bench.harness import load_subject
from nvium_core.bench.peers import best_variants
from nvium_core.bench.shapes import dense_twin, random_weights, shape_config
from nvium_core.model.causal_lm import NviumForCausalLM
from tests.bench.tiny import tiny_subject
from tests.model.gguf_files import write_gguf as write_given_file
from tests.model.test_backbones import random_model as random_backbone
from tests.test_gguf_conversion import FIELDS, SMALL

WORKLOAD = Workload(prompt=[1, 2, 3, 4, 5], num_sequences=3, num_tokens=7)


def loud_twin(**shape: int) -> NviumForCausalLM:
    """Build a twin of the smallest shape, with few tokens and weights so large that logits differ."""
    config = shape_config("4x128", vocab_size=101)
    for name, value in shape.items():
        setattr(config, name, value)
    twin = dense_twin(random_weights(config, dtype=torch.float32))
    generator = torch.Generator().manual_seed(0)
    for parameter in twin.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.2, generator=generator)
    return twin


def needs_llama_cpp() -> None:
    try:
        llama_cpp.check_available("cpu")
    except NotAvailable as reason:
        pytest.skip(f"llama.cpp: {reason}")


def build() -> Path:
    return next(iter(builds().values()))


@contextmanager
def running(name: str, twin: NviumForCausalLM, folder: Path) -> Iterator[Contender]:
    if name == "own":
        yield contender(engine_for(twin, WORKLOAD), WORKLOAD, "race")
    else:
        needs_llama_cpp()
        write_gguf(twin, file := folder / "twin.gguf", "f16")
        with closing(llama_cpp.Process(build(), file, "f16", WORKLOAD, threads=1)) as generate_turn:
            yield generate_turn


@pytest.mark.parametrize("name", ["own", "llama.cpp"])
def test_every_sequence_gets_the_requested_number_of_tokens_in_every_turn(name, tmp_path):
    with running(name, loud_twin(), tmp_path) as generate_turn:
        turns = [generate_turn(turn) for turn in range(2)]
    for generated in turns:
        assert [len(tokens) for tokens in generated.token_ids] == [7, 7, 7]
        assert all(0 <= token < 101 for tokens in generated.token_ids for token in tokens)
        assert len(generated.first_token_seconds) == 3
        assert all(0 < first < generated.seconds for first in generated.first_token_seconds)
        assert len({tuple(tokens) for tokens in generated.token_ids}) == 3, "sequences have different seeds"
    assert turns[0].token_ids != turns[1].token_ids


@pytest.mark.parametrize(("kind", "tolerance"), [("f32", 2e-4), ("f16", 0.1), ("bf16", 0.4)])
@pytest.mark.parametrize("num_key_heads", [1, 2])
@torch.no_grad()
def test_llama_cpp_computes_the_logits_of_the_twin(tmp_path, kind, tolerance, num_key_heads):
    needs_llama_cpp()
    twin = loud_twin(num_key_value_heads=num_key_heads)
    tokens = [(7 * n) % 101 for n in range(20)]
    file = tmp_path / "twin.gguf"
    write_gguf(twin, file, kind)
    workload = Workload(prompt=tokens, num_sequences=1, num_tokens=7)
    with closing(llama_cpp.LlamaCpp(build(), file, kind, workload, threads=1)) as model:
        model.decode([(token, position, 0, True) for position, token in enumerate(tokens)])
        found = model.logits(range(len(tokens)))
    expected = twin(torch.tensor([tokens]), output_exit_logits=True).exit_logits[0, :, 0]
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)
    assert expected.std() > 1, "logits are larger than the tolerance"


def test_a_missing_peer_is_listed_with_the_command_to_install_it(monkeypatch):
    monkeypatch.setattr(llama_cpp, "NEEDED", ("json", "no_such_package"))
    with lineup(tiny_subject()) as who:
        assert who.files == {}
        assert who.left_out == {LLAMA_CPP: "no_such_package not installed; run pip install 'nvium[bench]'"}


def test_a_gguf_file_is_compared_with_llama_cpp_on_the_same_file_and_a_crash_is_listed(tmp_path):
    needs_llama_cpp()
    file = write_given_file(tmp_path / "model.F16.gguf", random_backbone("llama", SMALL), "F16", tokenizer=FIELDS)
    subject = load_subject(str(file), None, None, None, "cpu", "bfloat16")
    names = [", ".join(filter(None, (GIVEN_FILE, label))) for label in builds()]
    with lineup(subject, (LLAMA_CPP,)) as who:
        with who.ready(WORKLOAD) as contenders:
            assert contenders.keys() == {"race", "whole", *names}
            assert [len(tokens) for tokens in contenders[names[0]](0).token_ids] == [7, 7, 7]
        assert who.builds[names[0]]["features"] and not who.builds[names[0]]["is_degraded"]
        file.unlink()  # the model maps the old content
        file.write_bytes(b"no model")
        with who.ready(WORKLOAD) as contenders:
            assert contenders.keys() == {"race", "whole"}
        reasons = {name + mark: "llama.cpp cannot load model.F16.gguf" for name in names for mark in ("", UNPACKED)}
        assert who.left_out == reasons


def test_a_build_that_crashes_when_it_repacks_weights_is_marked_as_degraded(monkeypatch):
    class Process:
        def __init__(self, *_: object, repacks: bool) -> None:
            self.description = {"version": "9", "features": "AMX"}
            if repacks:
                raise ContenderFailed("llama.cpp crashed (Segmentation fault)")

        def __call__(self, turn: int) -> Generation:
            return Generation(seconds=1.0, first_token_seconds=[], token_ids=[])

        def close(self) -> None: ...

    monkeypatch.setattr(llama_cpp, "Process", Process)
    monkeypatch.setattr("nvium_core.bench.contenders.lineup.builds", lambda: {"other": Path()})
    who = Lineup(tiny_subject(), None, (LLAMA_CPP,), {"q4_0": Path()})
    name = "llama.cpp/q4_0, other"
    with who.ready(WORKLOAD) as contenders:
        assert contenders.keys() == {"race", "whole", name + UNPACKED}
    assert who.builds == {name + UNPACKED: {"version": "9", "features": "AMX", "is_degraded": True}}
    assert who.left_out == {name: "llama.cpp crashed (Segmentation fault)"}


def test_a_killed_llama_cpp_is_an_error_that_names_the_signal(tmp_path):
    with running("llama.cpp", loud_twin(), tmp_path) as process:
        process._process.kill()
        with pytest.raises(ContenderFailed, match=r"^llama.cpp crashed \(Killed\)$"):
            process(1)


def test_a_function_that_another_build_lacks_fails_only_when_it_is_called():
    lacking = Library(None).llama_process
    with pytest.raises(ContenderFailed, match="lacks llama_process"):
        lacking(1)


def test_a_twin_that_cannot_be_written_as_gguf_skips_llama_cpp():
    needs_llama_cpp()
    subject = tiny_subject()
    subject.model.config.rope_parameters = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}
    with lineup(subject) as who:
        assert who.files == {}
        assert who.left_out == {LLAMA_CPP: "writing a GGUF file with rope_type 'linear' is not supported"}


def test_the_fastest_variant_of_a_peer_counts():
    rates = {"race": 9.0, "llama.cpp/bf16": 3.0, "llama.cpp/f16": 4.0, "whole": 5.0}
    found = best_variants({name: {"tokens_per_second": rate} for name, rate in rates.items()})
    assert found == {"llama.cpp": "llama.cpp/f16", "whole": "whole"}


def turn(seconds: float, **disturbed: float) -> Generation:
    return Generation(seconds=seconds, first_token_seconds=[], token_ids=[], **disturbed)


def test_quiet_and_disturbed_turns_have_a_median_each():
    turns = [turn(1), turn(2, alone_seconds=0.2), turn(1, alone_seconds=0.005), turn(1, stolen_seconds=64)]
    found = states(turns, [10.0, 5.0, 12.0, 9.0])
    assert found["alone_seconds"] == [0, 0.2, 0.005, 0]
    assert found["states"] == {
        "quiet": {"turns": 2, "tokens_per_second": 11},
        "disturbed": {"turns": 2, "tokens_per_second": 7},
    }


def test_a_turn_records_only_what_happened_during_it():
    found = watched(turn)(3)
    assert found.seconds == 3
    assert 0 <= found.stolen_seconds <= stolen_seconds() and found.alone_seconds == 0
