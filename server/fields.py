"""The table of all request fields: `python -m server.fields > docs/fields.md`."""

import json
import sys
from collections.abc import Iterable, Iterator
from copy import copy
from itertools import chain
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

*Honoured*: the field works; an invalid value is a 400 that names the field. *Neutral only*: these values change nothing
and are accepted, any other is a 400. *Refused*: only null is accepted, which is every field's default. Hints without
effect here, and fields in no table, are accepted and named in the header `x-nvium-ignored-params`; unknown keys in
`nvium` are refused.
"""


def document() -> str:
    return "\n".join([INTRODUCTION, *(section(title, body) for title, body in ENDPOINTS.items())])


def section(title: str, body: type[RequestBody]) -> str:
    rows = "\n".join(f"| `{name}` | {fate(field)} | {default(field)} | {note(field)} |" for name, field in fields(body))
    return f"## {title}\n\n| field | | default | |\n|---|---|---|---|\n{rows}\n"


def fields(body: type[RequestBody], within: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """All fields by their path, nested ones after the field that holds them."""
    for name, field in body.model_fields.items():
        path = f"{within}{field.alias or name}"
        yield path, field
        is_list = "list[" in str(field.annotation)
        yield from merged(
            fields(nested, f"{path}[]." if is_list else f"{path}.") for nested in nested_bodies(field.annotation)
        )


def merged(variants: Iterable[Iterable[tuple[str, FieldInfo]]]) -> Iterator[tuple[str, FieldInfo]]:
    """The fields of the members of a union: honoured if one honours it, required if all require it."""
    by_path: dict[str, list[FieldInfo]] = {}
    for path, field in chain.from_iterable(variants):
        by_path.setdefault(path, []).append(field)
    for path, alike in by_path.items():
        field = copy(next((field for field in alike if not neutral(field)), alike[0]))
        if not all(other.is_required() for other in alike):
            field.default = None if field.is_required() else field.default
        yield path, field


def nested_bodies(annotation: Any) -> list[type[RequestBody]]:
    """The models of objects that a field of this type may hold."""
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
