"""A run's folder: its lock, and the trained model."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout
from safetensors import SafetensorError
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import GENERATION_CONFIG_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.logging import disable_progress_bar

from nvium_core.training.data.tokens import save_tokenizer
from nvium_core.training.errors import TrainingError


@contextmanager
def owned(folder: Path) -> Iterator[None]:
    """Create and lock the folder. Raise `TrainingError` if it cannot be created or another run has locked it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / "lock").acquire(blocking=False)
    except Timeout as error:
        raise TrainingError(f"{folder}: another run is using it") from error
    except OSError as error:
        raise TrainingError(f"{folder}: cannot write to the folder ({error})") from error
    with lock:
        yield


def write_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write the model and its tokenizer as a Hugging Face folder, atomically. Replace an earlier folder."""
    partial = folder.with_name("model.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        disable_progress_bar()
        model.save_pretrained(partial)
        if model.generation_config.eos_token_id == model.config.eos_token_id:  # generation_config.json adds nothing
            (partial / GENERATION_CONFIG_NAME).unlink(missing_ok=True)
        save_tokenizer(tokenizer, partial)
        (partial / SAFE_WEIGHTS_NAME).chmod(0o644)  # transformers writes a file that only the owner can read
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    except (OSError, SafetensorError) as error:
        raise TrainingError(f"{partial}: cannot write the model ({error}); the checkpoint is intact") from error
