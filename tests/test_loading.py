import json
import shutil
from pathlib import Path

import pytest
import torch

from nvium_core import CheckpointError, load_model
from nvium_core.loading import bundled_model, check_gpu_memory, model_name
from nvium_core.text.folder_tokenizer import folder_tokenizer
from tests.byte_model import NAME, save_byte_model
from tests.random_models import random_model


def test_a_model_has_the_name_of_its_training_run_or_the_last_part_of_its_own(tmp_path):
    for run in (tmp_path / "runs" / "foxes", tmp_path / "runs"):
        (run / "model").mkdir(parents=True, exist_ok=True)
        (run / "recipe.json").write_text("{}")
    assert model_name(tmp_path / "runs" / "foxes" / "model") == "foxes"
    assert model_name(tmp_path / "runs" / "foxes") == "foxes"
    assert model_name(tmp_path / "foxes" / "model") == "model"
    assert model_name(Path("someone/foxes-1b")) == "foxes-1b"


def test_weights_that_exceed_a_gpus_free_memory_are_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (1000, 80_000_000_000))
    with pytest.raises(CheckpointError, match=r"^device cuda: the weights need 0.00 GB, 0.00 GB are free$"):
        check_gpu_memory(random_model([1, 2]), torch.device("cuda"))


def test_a_stored_padding_or_truncation_does_not_change_what_is_encoded(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(bundled_model(), folder, ignore=shutil.ignore_patterns("*.safetensors"))
    stored = folder / "tokenizer.json"
    plain = folder_tokenizer(folder).backend_tokenizer.encode("Once upon a time").ids
    changed = json.loads(stored.read_text())
    changed["padding"] = {"strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0}
    changed["padding"] |= {"pad_type_id": 0, "pad_token": "<|endoftext|>"}
    changed["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    stored.write_text(json.dumps(changed))
    assert folder_tokenizer(folder).backend_tokenizer.encode("Once upon a time").ids == plain


def special(token_id, number=1):
    """Return a post-processor that adds a token `number`² times."""
    token = {"id": "x", "ids": [token_id] * number, "tokens": ["x"] * number}
    single = [{"SpecialToken": {"id": "x", "type_id": 0}}] * number
    return {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": {"x": token}}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model": {"type": "BPE", "vocab": {}, "merges": []}, "added_tokens": []}, "model.vocab: is empty"),
        ({"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"}}, "model.unk_token: .*UNK"),
        ({"post_processor": special(1, 6_000)}, "encoding a text crashes, or exceeds"),
        ({"post_processor": special(257)}, "token id 257, but the model's vocab_size is 257"),
        ({"model": {"type": "WordLevel", "vocab": {"a": 0, "b": 900}, "unk_token": "a"}}, "token id 900"),
    ],
)
def test_a_tokenizer_that_cannot_be_used_is_refused_by_file_and_field(tmp_path, changed, message):
    folder = save_byte_model(tmp_path / NAME)
    stored = folder / "tokenizer.json"
    stored.write_text(json.dumps(json.loads(stored.read_text()) | changed))
    with pytest.raises(CheckpointError, match=f"{folder}.*{message}"):
        load_model(str(folder), "cpu")
