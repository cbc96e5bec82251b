"""A model folder is data: nothing in it is ever run, and weights come from safetensors alone."""

import json
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nvium_core import CheckpointError, load_model
from nvium_core.model.checkpoint import HUB_FILES
from tests.byte_model import byte_tokenizer
from tests.random_models import random_model

ROOT = Path(__file__).parents[2]
CODE = "import pathlib\npathlib.Path({mark!r}).touch()\nclass Custom: pass\n"
AUTO_MAP = dict.fromkeys(("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer"), "custom.Custom")


class Bomb:
    """Pickled, it leaves a mark where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Callable[..., object], tuple[Any, ...]]:
        return Path.touch, (self._mark,)


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """A file that is there once something of the folder was run."""
    return tmp_path / "was-run"


@pytest.fixture
def folder(tmp_path: Path, mark: Path) -> Path:
    """A good folder with code beside it."""
    folder = tmp_path / "bytes"
    random_model([1, 2], vocab_size=257, dtype=torch.float32).save_pretrained(folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    write(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})
    (folder / "custom.py").write_text(CODE.format(mark=str(mark)))
    return folder


def write(file: Path, fields: dict[str, Any]) -> None:
    known = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(known | fields))


def pickled(file: Path, mark: Path) -> Path:
    file.write_bytes(pickle.dumps({"weights": Bomb(mark)}))
    return file


def load(folder: Path) -> object:
    return load_model(str(folder), "cpu", "float32")


def test_pickles_are_refused_or_not_looked_at(folder: Path, mark: Path) -> None:
    pickled(folder / "pytorch_model.bin", mark)
    assert load(folder)
    for name in ("model.safetensors", "tokenizer.json", "config.json", "tokenizer_config.json"):
        whole = (folder / name).read_bytes()
        pickled(folder / name, mark)
        with pytest.raises(CheckpointError):
            load(folder)
        (folder / name).write_bytes(whole)
    (folder / "model.safetensors").unlink()
    for name in ("model.pt", "model.ckpt", "consolidated.00.pth"):
        pickled(folder / name, mark)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load(folder)
    write(folder / "model.safetensors.index.json", {"weight_map": {"lm_head.weight": "pytorch_model.bin"}})
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin"):
        load(folder)
    assert not mark.exists()


def test_code_that_a_folder_names_is_not_run(folder: Path, mark: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: mark.touch() or "y")  # transformers would ask
    write(folder / "config.json", {"auto_map": AUTO_MAP})
    write(folder / "tokenizer_config.json", {"auto_map": {"AutoTokenizer": [None, "custom.Custom"]}})
    assert load(folder)
    (folder / "tokenizer.json").unlink()
    custom = {"auto_map": {"AutoTokenizer": ["custom.Custom", None]}, "tokenizer_class": "Custom"}
    write(folder / "tokenizer_config.json", custom)
    with pytest.raises(CheckpointError, match="no usable tokenizer"):
        load(folder)
    write(folder / "config.json", {"model_type": "custom", "architectures": ["Custom"]})
    with pytest.raises(CheckpointError, match="model_type 'custom'"):
        load(folder)
    assert not mark.exists()


def test_nothing_but_data_is_fetched_from_the_hub() -> None:
    assert {Path(pattern).suffix for pattern in HUB_FILES} == {
        ".json",
        ".safetensors",
        ".model",
        ".jinja",
        ".yaml",
        ".md",
    }
    assert "*.safetensors" not in HUB_FILES


UNPICKLING = ("pickle.load", "weights_only=False", "yaml.load(", "yaml.unsafe_load", "joblib.load")
READING = re.compile(r"\bAuto\w+\.from_pretrained\(.*")
OURS = [path for package in ("nvium_core", "server", "loadtest") for path in sorted((ROOT / package).rglob("*.py"))]


PIPE = ROOT / "nvium_core" / "engine" / "process.py"
"""Reads pickles from the pipe to its own child process, and no file."""


def lines_of_ours() -> list[str]:
    return [line for path in OURS if path != PIPE for line in path.read_text(encoding="utf-8").splitlines()]


def test_no_source_lets_a_folder_bring_its_code() -> None:
    told = [line for line in lines_of_ours() if "trust_remote_code" in line]
    assert all("trust_remote_code=False" in line for line in told)
    reading = [line for line in lines_of_ours() if READING.search(line)]
    assert reading
    assert [line for line in reading if line not in told] == []


def test_no_source_unpickles() -> None:
    """But for PyTorch's own reader of a training run's state, which is told to take weights alone."""
    assert [line for line in lines_of_ours() if any(word in line for word in UNPICKLING)] == []
    reads = [line for line in lines_of_ours() if "torch.load(" in line]
    assert reads
    assert all("weights_only=True" in line for line in reads)
