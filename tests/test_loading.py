import json
import shutil
from pathlib import Path

import pytest

from nvium_core.loading import bundled_model, fast_tokenizer, model_name


@pytest.mark.parametrize(
    ("folder", "is_run", "name"),
    [("runs/foxes/model", True, "foxes"), ("foxes/model", False, "model"), ("runs/foxes", True, "foxes")],
)
def test_a_model_has_the_name_of_its_training_run_or_the_last_part_of_its_own(tmp_path, folder, is_run, name):
    path = tmp_path / folder
    path.mkdir(parents=True)
    if is_run:
        (path.parent / "recipe.json").write_text("{}")
    assert model_name(path) == name
    assert model_name(Path("someone/foxes-1b")) == "foxes-1b"


def test_a_stored_padding_or_truncation_does_not_change_what_is_encoded(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(bundled_model(), folder, ignore=shutil.ignore_patterns("*.safetensors"))
    stored = folder / "tokenizer.json"
    plain = fast_tokenizer(folder).backend_tokenizer.encode("Once upon a time").ids
    changed = json.loads(stored.read_text())
    changed["padding"] = {"strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0}
    changed["padding"] |= {"pad_type_id": 0, "pad_token": "<|endoftext|>"}
    changed["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    stored.write_text(json.dumps(changed))
    assert fast_tokenizer(folder).backend_tokenizer.encode("Once upon a time").ids == plain
