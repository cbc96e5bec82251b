"""Fields that other servers have and this one does not know: those that would change what is generated are refused."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from server.schemas.body import Hint, NeutralOnly

ANY = NeutralOnly(why=": it would change what is generated")
OFF = NeutralOnly(False, why=ANY.why)
EMPTY = NeutralOnly("", [], {}, why=ANY.why)
ZERO = NeutralOnly(0, 0.0, why=ANY.why)

FOREIGN: dict[str, NeutralOnly] = {
    # vLLM
    "echo": OFF,
    "add_special_tokens": ANY,
    "chat_template": ANY,
    "documents": EMPTY,
    "thinking_token_budget": ANY,
    # SGLang
    "regex": EMPTY,
    "ebnf": EMPTY,
    "min_new_tokens": ZERO,
    "max_new_tokens": ANY,
    "stop_regex": EMPTY,
    # llama.cpp
    "json_schema": EMPTY,
    "samplers": ANY,
    "n_predict": NeutralOnly(-1, why=ANY.why),
    "top_n_sigma": NeutralOnly(-1, -1.0, why=ANY.why),
    # Transformers and others
    "bad_words_ids": EMPTY,
    "suppress_tokens": EMPTY,
    "no_repeat_ngram_size": ZERO,
    "encoder_repetition_penalty": NeutralOnly(1, 1.0, why=ANY.why),
    "epsilon_cutoff": ZERO,
    "eta_cutoff": ZERO,
    "penalty_alpha": ZERO,
    "num_beams": NeutralOnly(1, why=ANY.why),
    "do_sample": NeutralOnly(True, why=ANY.why),
    "response_schema": EMPTY,
}


def check_foreign(unknown: Mapping[str, Any]) -> None:
    """Raise `InvalidField` for a field that would change what is generated."""
    for name, value in unknown.items():
        if name in FOREIGN or name.startswith("guided_"):
            FOREIGN.get(name, ANY).check(name, value)


def check_elsewhere(unknown: Mapping[str, Any], other: type[BaseModel], endpoint: str) -> None:
    """Raise `InvalidField` for a field that another endpoint has, unless it is at its default there."""
    for name, value in unknown.items():
        if field := other.model_fields.get(name):
            marks = [mark for mark in field.metadata if isinstance(mark, NeutralOnly)]
            mark = marks[0] if marks else NeutralOnly(*neutral(field.default), why=f" here; `{endpoint}` has it")
            if not isinstance(mark, Hint):
                mark.check(name, value)


def neutral(default: Any) -> list[Any]:
    if default is PydanticUndefined:
        return []
    is_whole = isinstance(default, float) and default.is_integer()
    return [default, int(default)] if is_whole else [default]
