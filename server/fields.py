"""The table of all fields and what becomes of them: `python -m server.fields > docs/fields.md`."""

import json
import sys
from collections.abc import Iterator
from typing import Any, get_args

from pydantic.fields import FieldInfo

from server.schemas.body import Hint, NeutralOnly, RequestBody
from server.schemas.chat import ChatRequest
from server.schemas.completions import CompletionRequest
from server.schemas.responses import ResponseRequest
from server.schemas.tokens import DetokenizeRequest, TokenizeRequest

ENDPOINTS: dict[str, type[RequestBody]] = {
    "POST /v1/completions": CompletionRequest,
    "POST /v1/chat/completions": ChatRequest,
    "POST /v1/responses": ResponseRequest,
    "POST /tokenize": TokenizeRequest,
    "POST /detokenize": DetokenizeRequest,
}

INTRODUCTION = """\
# Fields of requests

Generated from the schemas by `python -m server.fields`.

*Honoured*: does what it says; a value that it cannot have is answered with 400 that names the field. *Neutral only*:
these values ask for nothing and pass, any other is answered with 400. *Refused*: only null passes, which is the default
everywhere. Hints that change nothing here, and fields that are in no table, are accepted and named in the header
`x-nvium-ignored-params`; unknown keys within `nvium` are refused.
"""


def document() -> str:
    return "\n".join([INTRODUCTION, *(section(title, body) for title, body in ENDPOINTS.items())])


def section(title: str, body: type[RequestBody]) -> str:
    rows = "\n".join(f"| `{name}` | {fate(field)} | {default(field)} | {note(field)} |" for name, field in fields(body))
    return f"## {title}\n\n| field | | default | |\n|---|---|---|---|\n{rows}\n"


def fields(body: type[RequestBody], within: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """All fields by their path, those of nested objects after the field that holds them."""
    for name, field in body.model_fields.items():
        path = f"{within}{field.alias or name}"
        yield path, field
        is_list = "list[" in str(field.annotation)
        for nested in nested_bodies(field.annotation):
            yield from fields(nested, f"{path}[]." if is_list else f"{path}.")


def nested_bodies(annotation: Any) -> list[type[RequestBody]]:
    """The kinds of objects that a field of this type may hold."""
    if isinstance(annotation, type) and issubclass(annotation, RequestBody):
        return [annotation]
    return [body for inner in get_args(annotation) for body in nested_bodies(inner)]


def neutral(field: FieldInfo) -> NeutralOnly | None:
    return next((mark for mark in field.metadata if isinstance(mark, NeutralOnly)), None)


def fate(field: FieldInfo) -> str:
    mark = neutral(field)
    if mark is None:
        return "honoured"
    if isinstance(mark, Hint):
        return "named in the header"
    return f"neutral only: {', '.join(map(code, mark.values))}" if mark.values else "refused"


def default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.default
    return "" if value is None or isinstance(value, RequestBody) else code(value)


def note(field: FieldInfo) -> str:
    mark = neutral(field)
    return field.description or (mark.why.lstrip(":; ") if mark else "")


def code(value: Any) -> str:
    return f"`{json.dumps(value)}`"


if __name__ == "__main__":
    sys.stdout.write(document())
