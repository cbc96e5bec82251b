"""Tables of endpoints and request fields, from the routes and schemas. A field that endpoints share is listed once."""

import json
from collections.abc import Iterable, Iterator
from copy import copy
from itertools import chain, groupby
from typing import Any, NamedTuple, get_args

from pydantic.fields import FieldInfo

from docs.tables.table import Cell, Table, table
from server.http.middleware import PROBES
from server.routes.openapi import document
from server.routes.tokens import DetokenizeRequest, TokenizeRequest
from server.schemas.body import RequestBody, Unsupported
from server.schemas.chat import ChatRequest
from server.schemas.completions import CompletionRequest
from server.schemas.generation import GenerationRequest
from server.schemas.responses import ResponseRequest

PAGE = ["`GET /`", "[The playground](playground.md), unless `--no-playground` removes it", "no"]

HEAD = ["field", "default", "description"]


class Row(NamedTuple):
    """A table row for the field at a path such as `messages[].content`."""

    path: str
    default: str
    description: str

    @property
    def top_field(self) -> str:
        return self.path.partition(".")[0].removesuffix("[]")


@table
def endpoints() -> Table:
    rows = [
        [f"`{method.upper()} {path}`", operation["summary"], "no" if path in PROBES else "yes"]
        for path, operations in document()["paths"].items()
        for method, operation in operations.items()
    ]
    return ["endpoint", "what it does", "needs a key, if keys are set"], [*rows, PAGE]


@table
def fields_shared() -> Table:
    return HEAD, shown(supported(GenerationRequest))


@table
def fields_completions() -> Table:
    return HEAD, shown(supported(CompletionRequest, GenerationRequest))


@table
def fields_chat() -> Table:
    return HEAD, shown(supported(ChatRequest, GenerationRequest))


@table
def fields_responses() -> Table:
    return HEAD, [*elsewhere(ResponseRequest, ChatRequest), *shown(supported(ResponseRequest, ChatRequest))]


@table
def fields_tokenize() -> Table:
    return HEAD, [*elsewhere(TokenizeRequest, ChatRequest), *shown(supported(TokenizeRequest, ChatRequest))]


@table
def fields_detokenize() -> Table:
    return HEAD, shown(supported(DetokenizeRequest))


def supported(body: type[RequestBody], other: type[RequestBody] | None = None) -> list[Row]:
    """Return the body's supported fields that the other body lacks or describes differently, required ones first.

    Parents of such fields are included.
    """
    known = set(rows_of(other)) if other else set()
    known |= {row._replace(description="") for row in known}
    rows = rows_of(body)
    own = [row.path for row in rows if row not in known]
    kept = [row for row in rows if any(f"{path}.".startswith((f"{row.path}.", f"{row.path}[")) for path in own)]
    required = {row.path for row in kept if row.default == "required"}
    return sorted(kept, key=lambda row: row.top_field not in required)


def elsewhere(body: type[RequestBody], other: type[RequestBody]) -> Iterator[list[Cell]]:
    """Yield one row with the names of the fields that both bodies support alike."""
    own = {row.top_field for row in supported(body, other)}
    names = dict.fromkeys(row.top_field for row in rows_of(body) if row.top_field not in own)
    yield [", ".join(f"`{name}`" for name in names), None, "As in chats."]


def rows_of(body: type[RequestBody]) -> list[Row]:
    return [
        Row(path, default(field), " ".join((field.description or "").split()))
        for path, field in fields(body)
        if is_supported(field)
    ]


def shown(rows: Iterable[Row]) -> Iterator[list[Cell]]:
    """Yield the cells of each row. Neighbours that differ only in their paths share a row."""
    for (default, description), alike in groupby(rows, key=lambda row: row[1:]):
        yield [", ".join(f"`{row.path}`" for row in alike), default, description]


def fields(body: type[RequestBody], within: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield all fields with their paths, each nested field after its parent."""
    for name, field in body.model_fields.items():
        path = f"{within}{field.alias or name}"
        yield path, field
        is_list = "list[" in str(field.annotation)
        yield from merged(
            fields(nested, f"{path}[]." if is_list else f"{path}.") for nested in nested_bodies(field.annotation)
        )


def merged(variants: Iterable[Iterable[tuple[str, FieldInfo]]]) -> Iterator[tuple[str, FieldInfo]]:
    """Merge the fields of a union's members: supported if any member supports it, required if all require it."""
    by_path: dict[str, list[FieldInfo]] = {}
    for path, field in chain.from_iterable(variants):
        by_path.setdefault(path, []).append(field)
    for path, alike in by_path.items():
        field = copy(next((field for field in alike if is_supported(field)), alike[0]))
        if not all(other.is_required() for other in alike):
            field.default = None if field.is_required() else field.default
        yield path, field


def nested_bodies(annotation: Any) -> list[type[RequestBody]]:
    """Return the models within a type."""
    if isinstance(annotation, type) and issubclass(annotation, RequestBody):
        return [annotation]
    return [body for inner in get_args(annotation) for body in nested_bodies(inner)]


def is_supported(field: FieldInfo) -> bool:
    return not any(isinstance(mark, Unsupported) for mark in field.metadata)


def default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.default
    return "" if value is None or isinstance(value, RequestBody) else f"`{json.dumps(value)}`"
