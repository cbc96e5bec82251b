"""Endpoints and fields of requests, from the routes and the schemas. A field that endpoints share is listed once."""

import json
from collections.abc import Iterable, Iterator
from copy import copy
from itertools import chain
from typing import Any, NamedTuple, get_args

from pydantic.fields import FieldInfo

from docs.tables.table import Cell, Table, table
from server.http.keys import PROBES
from server.routes.openapi import ROUTES
from server.schemas.body import Hint, NeutralOnly, RequestBody, WithoutEffect
from server.schemas.chat import ChatRequest
from server.schemas.completions import CompletionRequest
from server.schemas.foreign import FOREIGN
from server.schemas.generation import GenerationRequest
from server.schemas.responses import ResponseRequest
from server.schemas.tokens import DetokenizeRequest, TokenizeRequest

BODIES: dict[str, type[RequestBody]] = {
    "completions": CompletionRequest,
    "chats": ChatRequest,
    "responses": ResponseRequest,
    "tokenize": TokenizeRequest,
    "detokenize": DetokenizeRequest,
}
GENERATING = ("completions", "chats", "responses")
STATUSES = ("only", "refused", "ignored", "without")

PAGE = ["`GET /`", "[The playground](playground.md), unless `--no-playground` removes it", "no"]

HEAD = ["field", "default", ""]


class Row(NamedTuple):
    """A field by its path, as a table shows it."""

    path: str
    default: str
    note: str

    @property
    def name(self) -> str:
        """Of the top-level field that holds it."""
        return self.path.partition(".")[0].removesuffix("[]")


@table
def endpoints() -> Table:
    rows = [
        [f"`{route.method.upper()} {route.path}`", route.summary, "no" if route.path in PROBES else "yes"]
        for route in ROUTES
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


@table
def fields_unsupported() -> Table:
    """What endpoints treat alike in one row."""
    alike: dict[tuple[str, str, str], list[str]] = {}
    for name, where, status, reason in unsupported():
        alike.setdefault((where, status, reason), []).append(f"`{name}`")
    rows = [[", ".join(names), where, status, reason] for (where, status, reason), names in alike.items()]
    return ["field", "of", "status", ""], sorted(rows, key=lambda row: STATUSES.index(row[2].partition(" ")[0]))


def unsupported() -> Iterator[tuple[str, str, str, str]]:
    """Field, endpoints, status and reason."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for endpoint, body in BODIES.items():
        for path, field in fields(body):
            if mark := neutral(field):
                found.setdefault((path, fate(mark), field.description or why(mark)), []).append(endpoint)
    for (path, status, reason), endpoints in found.items():
        yield path, ", ".join(endpoints), status, reason
    for name, mark in FOREIGN.items():
        yield name, lacking(name), fate(mark), ""


def lacking(name: str) -> str:
    """The generating endpoints without a field of this name."""
    return ", ".join(endpoint for endpoint in GENERATING if name not in BODIES[endpoint].model_fields)


def supported(body: type[RequestBody], other: type[RequestBody] | None = None) -> list[Row]:
    """What a body supports and the other does not alike, with what holds it; required fields first."""
    known = set(rows_of(other)) if other else set()
    known |= {row._replace(note="") for row in known}
    rows = rows_of(body)
    own = [row.path for row in rows if row not in known]
    kept = [row for row in rows if any(f"{path}.".startswith((f"{row.path}.", f"{row.path}[")) for path in own)]
    required = {row.path for row in kept if row.default == "required"}
    return sorted(kept, key=lambda row: row.name not in required)


def elsewhere(body: type[RequestBody], other: type[RequestBody]) -> Iterator[list[Cell]]:
    """A row that names the fields which the other supports too."""
    own = {row.name for row in supported(body, other)}
    names = dict.fromkeys(row.name for row in rows_of(body) if row.name not in own)
    yield [", ".join(f"`{name}`" for name in names), None, "As in chats."]


def rows_of(body: type[RequestBody]) -> list[Row]:
    return [Row(path, default(field), note(field)) for path, field in fields(body) if not neutral(field)]


def shown(rows: Iterable[Row]) -> list[list[Cell]]:
    return [[f"`{row.path}`", row.default, row.note] for row in rows]


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
    """The fields of the members of a union: supported if one supports it, required if all require it."""
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


def fate(mark: NeutralOnly) -> str:
    if isinstance(mark, WithoutEffect):
        return "ignored" if isinstance(mark, Hint) else "without effect"
    values = [value for number, value in enumerate(mark.values) if value not in mark.values[:number]]
    return f"only {', '.join(map(code, values))}" if values else "refused"


def default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.default
    return "" if value is None or isinstance(value, RequestBody) else code(value)


def note(field: FieldInfo) -> str:
    return " ".join((field.description or "").split())


def why(mark: NeutralOnly) -> str:
    return mark.why.lstrip(":; ")


def code(value: Any) -> str:
    return f"`{json.dumps(value)}`"
