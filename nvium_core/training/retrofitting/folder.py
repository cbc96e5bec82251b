"""The folder of a retrofit: a model that can be served, and beside it what is needed to go on."""

import json
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from nvium_core.model.nvium import NviumForCausalLM
from nvium_core.training.retrofitting.shape import RetrofitError
from nvium_core.training.run_folder import write_model

STATE_FOLDER = "retrofit"
RESULT = "retrofit.json"


def check_target(target: Path) -> None:
    """Raise `RetrofitError` for a folder that holds anything but a retrofit."""
    if target.exists() and not (target / STATE_FOLDER).is_dir() and (target.is_file() or any(target.iterdir())):
        raise RetrofitError(f"{target}: is not empty, and holds no retrofit to go on with; choose another folder")


def write_in_place(model: NviumForCausalLM, tokenizer: PreTrainedTokenizerFast, target: Path) -> None:
    """Put the model's files into the folder, each whole."""
    written = target / STATE_FOLDER / "model"
    write_model(model, tokenizer, written)
    for file in sorted(written.iterdir()):
        file.replace(target / file.name)
    written.rmdir()


def write_result(result: dict[str, Any], target: Path) -> None:
    (target / RESULT).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
