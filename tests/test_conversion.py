"""Models of every layout convert to the same model in our layout, or nothing is written."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from nvium_core import NviumForCausalLM, load_model
from nvium_core.conversion import ConversionError, convert
from nvium_core.loading import bundled_model
from tests.byte_model import load_byte_model, save_byte_model
from tests.limits import no_file_larger_than
from tests.model.llama_folders import edit_tensors, llama_folder, random_llama
from tests.model.test_published_layout import EXIT_LAYERS as PUBLISHED_EXITS
from tests.model.test_published_layout import write_published
from tests.random_models import random_model

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
TEXT = "Once upon a time, in a den"


def published_folder(folder: Path) -> Path:
    write_published(folder, random_model(PUBLISHED_EXITS, seed=3, vocab_size=257))
    load_byte_model().tokenizer.save_pretrained(folder)
    return folder


def hugging_face_folder(folder: Path) -> Path:
    llama_folder(folder, random_llama(vocab_size=8192))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(bundled_model() / name, folder / name)
    return folder


@pytest.fixture(params=[save_byte_model, published_folder, hugging_face_folder])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return request.param(tmp_path / "source")


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize("dtype", ["auto", *DTYPES])
def test_a_converted_model_has_the_weights_logits_exits_and_tokens_of_the_source(source, tmp_path, dtype):
    written = convert(source, tmp_path / "target", dtype)
    before = NviumForCausalLM.from_pretrained(source, dtype=DTYPES.get(dtype, "auto"))
    for kind in (NviumForCausalLM, AutoModelForCausalLM):
        after = kind.from_pretrained(tmp_path / "target")
        assert isinstance(after, NviumForCausalLM) and after.dtype == before.dtype
        assert f" in {str(before.dtype).removeprefix('torch.')}, " in written
        assert after.config.exit_layers == before.config.exit_layers
        weights = after.state_dict()
        assert weights.keys() == before.state_dict().keys()
        assert all(torch.equal(weights[name], tensor) for name, tensor in before.state_dict().items())
        with torch.inference_mode():
            input_ids = torch.arange(20)[None]
            assert torch.equal(after(input_ids).logits, before(input_ids).logits)
    ids = load_model(str(tmp_path / "target")).tokenizer(TEXT).input_ids
    assert ids == AutoTokenizer.from_pretrained(source)(TEXT).input_ids


def test_a_large_model_is_sharded(source, tmp_path):
    convert(source, tmp_path / "target", max_shard_bytes=20_000)
    assert len(list((tmp_path / "target").glob("model-*-of-*.safetensors"))) > 2
    before, after = (NviumForCausalLM.from_pretrained(folder).state_dict() for folder in (source, tmp_path / "target"))
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_the_widest_of_several_precisions_is_kept(tmp_path):
    source = hugging_face_folder(tmp_path / "source")
    edit_tensors(source, lambda tensors: tensors.update({"lm_head.weight": tensors["lm_head.weight"].bfloat16()}))
    assert " in float32, " in convert(source, tmp_path / "target")


def test_companion_files_are_copied_unchanged(tmp_path):
    source = save_byte_model(tmp_path / "source")
    (source / "generation_config.json").write_text('{"eos_token_id": [3, 5]}')
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "special_tokens_map.json").write_text('{"eos_token": "<|endoftext|>"}')
    (source / "training.log").write_text("not ours to copy")
    convert(source, tmp_path / "target")
    before, after = contents(source), contents(tmp_path / "target")
    assert after.keys() == before.keys() - {"training.log"}
    assert all(after[name] == before[name] for name in after.keys() - {"model.safetensors", "config.json"})
    assert GenerationConfig.from_pretrained(tmp_path / "target").eos_token_id == [3, 5]


def test_the_command_describes_the_result_in_one_line(nvium, tmp_path):
    published, target = published_folder(tmp_path / "published"), tmp_path / "deep" / "target"
    [line] = nvium("convert", published, target, "--dtype", "bfloat16").out.splitlines()
    num_parameters = sum(p.numel() for p in NviumForCausalLM.from_pretrained(target).parameters())
    expected = f"{target}: a 3-vium, exits after layer 1, layer 4, layer 5, {num_parameters:,} parameters in bfloat16"
    assert line.startswith(expected) and "tokenizer" not in line


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-20])


def exchange_tokenizers(folder: Path) -> None:
    shutil.copyfile(bundled_model() / "tokenizer.json", folder / "tokenizer.json")


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated weights": (lambda folder: truncate(folder / "model.safetensors"), "model.safetensors"),
    "truncated tokenizer": (lambda folder: truncate(folder / "tokenizer.json"), "tokenizer.json"),
    "damaged settings": (lambda folder: (folder / "tokenizer_config.json").write_bytes(b"\xff"), "tokenizer_config"),
    "damaged generation": (lambda folder: (folder / "generation_config.json").write_text("{"), "generation_config"),
    "too many tokens": (exchange_tokenizers, "token id 8191, but the model's vocab_size is 257"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_source_is_one_line_on_stderr_and_nothing_is_written(nvium, tmp_path, damage):
    source = save_byte_model(tmp_path / "source")
    inflict, complaint = DAMAGES[damage]
    inflict(source)
    assert complaint in nvium.refuses("convert", source, tmp_path / "target")
    assert list(tmp_path.iterdir()) == [source]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["SOURCE", "SOURCE"], "is not empty"),
        (["SOURCE", "FILE"], "is a file"),
        (["SOURCE", "FILE/target"], "cannot be written"),
        (["no-such-folder", "target"], "no-such-folder"),
        (["SOURCE"], "target"),
        (["SOURCE", "target", "--dtype", "float8"], "--dtype"),
    ],
)
def test_a_user_error_is_one_line_on_stderr_and_exit_code_2(nvium, monkeypatch, tmp_path, arguments, complaint):
    source = save_byte_model(tmp_path / "source")
    before = contents(source)
    (tmp_path / "file").write_text("in the way")
    monkeypatch.chdir(tmp_path)
    places = {"SOURCE": str(source), "FILE": "file", "FILE/target": "file/target"}
    assert complaint in nvium.refuses("convert", *(places.get(argument, argument) for argument in arguments)).lower()
    assert contents(source) == before
    assert {path.name for path in tmp_path.iterdir()} == {"source", "file"}


def test_a_full_disk_leaves_nothing_behind(tmp_path):
    source = save_byte_model(tmp_path / "source")
    with no_file_larger_than(10_000), pytest.raises(ConversionError, match="target: cannot be written"):
        convert(source, tmp_path / "target")
    assert list(tmp_path.iterdir()) == [source]
