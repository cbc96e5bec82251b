"""A model folder is data: its code is never run, and weights load from safetensors only."""

import json
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nvium_core import CheckpointError, load_model
from nvium_core.model.checkpoint import HUB_FILES
from tests.byte_model import NAME, save_byte_model

ROOT = Path(__file__).parents[2]
CODE = "import pathlib\npathlib.Path({mark!r}).touch()\nclass Custom: pass\n"
AUTO_MAP = dict.fromkeys(("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer"), "custom.Custom")


class Bomb:
    """Creates the file `mark` when unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Callable[..., object], tuple[Any, ...]]:
        return Path.touch, (self._mark,)


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    return tmp_path / "was-run"


@pytest.fixture
def folder(tmp_path: Path, mark: Path) -> Path:
    """A valid model folder that also has code."""
    folder = save_byte_model(tmp_path / NAME)
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


def test_pickles_are_rejected_or_ignored(folder, mark):
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


def test_custom_code_of_a_folder_is_not_run(folder, mark, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: mark.touch() or "y")  # transformers would ask
    write(folder / "config.json", {"auto_map": AUTO_MAP})
    write(folder / "tokenizer_config.json", {"auto_map": {"AutoTokenizer": [None, "custom.Custom"]}})
    assert load(folder)
    (folder / "tokenizer.json").unlink()
    custom = {"auto_map": {"AutoTokenizer": ["custom.Custom", None]}, "tokenizer_class": "Custom"}
    write(folder / "tokenizer_config.json", custom)
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        load(folder)
    write(folder / "config.json", {"model_type": "custom", "architectures": ["Custom"]})
    with pytest.raises(CheckpointError, match="model_type 'custom'"):
        load(folder)
    assert not mark.exists()


def test_only_data_is_downloaded_from_the_hub():
    suffixes = {".json", ".safetensors", ".model", ".jinja", ".yaml", ".md"}
    assert {Path(pattern).suffix for pattern in HUB_FILES} == suffixes
    assert "*.safetensors" not in HUB_FILES


UNPICKLING = ("pickle.load", "weights_only=False", "yaml.load(", "yaml.unsafe_load", "joblib.load")
READING = re.compile(r"\bAuto\w+\.from_pretrained\(.*")
PIPES = [ROOT / "server" / "structured_outputs" / name for name in ("constraints.py", "grammar_process.py")]
"""They read pickles from each other's processes, and from no file."""


def source_lines() -> list[str]:
    sources = [path for package in ("nvium_core", "server", "loadtest") for path in (ROOT / package).rglob("*.py")]
    return [line for path in sources if path not in PIPES for line in path.read_text(encoding="utf-8").splitlines()]


def test_no_source_trusts_remote_code():
    trusting = [line for line in source_lines() if "trust_remote_code" in line]
    assert all("trust_remote_code=False" in line for line in trusting)
    reading = [line for line in source_lines() if READING.search(line)]
    assert reading
    assert [line for line in reading if line not in trusting] == []


def test_no_source_unpickles():
    """`torch.load` of a training run's state is allowed with `weights_only=True`."""
    assert [line for line in source_lines() if any(word in line for word in UNPICKLING)] == []
    reads = [line for line in source_lines() if "torch.load(" in line]
    assert reads
    assert all("weights_only=True" in line for line in reads)
