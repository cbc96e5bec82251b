"""Reads the tokenizer of a model folder.

tokenizer.json decides the token ids. transformers' `AutoTokenizer` may replace its parts by those of the class that
tokenizer_config.json or config.json names.
"""

import json
from pathlib import Path
from typing import Any

import transformers
from tokenizers import Tokenizer, models, processors
from transformers import PreTrainedTokenizerFast

from nvium_core.errors import CheckpointError, one_line
from nvium_core.text.tokenizer_trial import try_tokenizer

TOKENIZER_FILE, CONFIG_FILE, TEMPLATE_FILE = "tokenizer.json", "tokenizer_config.json", "chat_template.json"

TOKEN_FILES = (CONFIG_FILE, "special_tokens_map.json", "added_tokens.json")
"""Files whose texts become tokens in addition to those of tokenizer.json."""

ONE_TOKEN = Tokenizer(models.WordLevel({"a": 0}, "a")).encode("a")


def folder_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Load a folder's tokenizer. Raise `CheckpointError` if it is missing, damaged or not fast."""
    try_tokenizers(folder)
    has_file = (folder / TOKENIZER_FILE).exists()
    try:
        if has_file:
            made = PreTrainedTokenizerFast.from_pretrained(folder)
        else:
            made = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False, mistral_format=False)
        complete(made, folder)
    except Exception as error:  # damaged files raise various exceptions in transformers and tokenizers
        reason = (str(error).splitlines() or [repr(error)])[0]
        missing, damaged = f"no {TOKENIZER_FILE}; a fast tokenizer is required", f"no usable tokenizer ({reason})"
        raise CheckpointError(f"{folder}: {damaged if has_file else missing}") from error
    if not isinstance(made.model_max_length, int | float):  # transformers compares prompt lengths with this
        raise CheckpointError(f"{folder / CONFIG_FILE}: model_max_length must be a number")
    return made


def complete(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Do what transformers leaves out: unset padding and truncation, set begin-of-text, end-of-text and template."""
    backend, config = tokenizer.backend_tokenizer, read_object(folder / CONFIG_FILE)
    backend.no_padding()  # a stored padding or truncation would change every text that is encoded
    backend.no_truncation()
    before, after = found = frame(backend)
    before = with_first(before, tokenizer.bos_token_id, config.get("add_bos_token"))
    after = with_first(after[::-1], tokenizer.eos_token_id, config.get("add_eos_token"))[::-1]
    if (before, after) != found:
        set_frame(backend, before, after)
    tokenizer.chat_template = tokenizer.chat_template or read_object(folder / TEMPLATE_FILE).get("chat_template")


def frame(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return the ids that the tokenizer puts before and after a text. It must not truncate."""
    framed = tokenizer.post_process(ONE_TOKEN)
    place = [*framed.special_tokens_mask, 0].index(0)  # a damaged post-processor may drop the text
    return framed.ids[:place], framed.ids[place + 1 :]


def set_frame(tokenizer: Tokenizer, before: list[int], after: list[int]) -> None:
    special = [{"id": str(token), "ids": [token], "tokens": [tokenizer.id_to_token(token)]} for token in before + after]
    single = [*map(str, before), "$A", *map(str, after)]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=special)


def read_object(file: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(file.read_text("utf-8")) if file.exists() else {}
    return read


def with_first(ids: list[int], token: int | None, is_wanted: Any) -> list[int]:
    """Return the ids with the token in front if it is wanted, without it if not, and unchanged if nothing is said."""
    if token is None or not isinstance(is_wanted, bool) or is_wanted == (ids[:1] == [token]):
        return ids
    return [token, *ids] if is_wanted else ids[1:]


def try_tokenizers(folder: Path) -> None:
    """Try a folder's tokenizers in another process. Raise `CheckpointError` for one that fails."""
    tokenizers = {path.name for path in folder.glob("tokenizer*.json")} - {*TOKEN_FILES}
    texts = list[str]()
    for path in (path for name in (*TOKEN_FILES, *tokenizers) if (path := folder / name).is_file()):
        try:
            if path.name in tokenizers:
                try_tokenizer(path.read_text("utf-8"), texts)
            else:
                texts.append(json.dumps(json.loads(path.read_text("utf-8")), ensure_ascii=False))
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{path}: {one_line(error)}") from error
