"""Base classes of all bodies: null means the default, and unknown fields are accepted and reported."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, ValidationError, core_schema

from server.errors import INVALID, UNSUPPORTED, WRONG_FIELD, InvalidField

MAX_FIELDS = 1_000  # maximum number of fields in a JSON object of a request

TOO_MANY = "too_many"


class Unsupported:
    """Marks an unsupported field. The field accepts only null and `values`, which have no effect.

    `why` is appended to the message "not supported".
    """

    def __init__(self, *values: Any, why: str = "") -> None:
        self.values = values
        self.why = why

    def is_neutral(self, value: Any) -> bool:
        return any(type(value) is type(neutral) and value == neutral for neutral in (*self.values, None))

    def check(self, param: str, value: Any) -> None:
        if not self.is_neutral(value):
            allowed = " or ".join(json.dumps(allowed) for allowed in (*self.values, None))
            raise InvalidField(param, f"not supported{self.why}; must be {allowed}", code=UNSUPPORTED)

    def __get_pydantic_json_schema__(self, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"enum": list(self.values)} if self.values else {"type": "null"}


class Ignored(Unsupported):
    """Marks a field that is ignored. If its value is not neutral, the field is named in `x-nvium-ignored-params`."""

    def check(self, param: str, value: Any) -> None:
        """Accept any value."""

    def __get_pydantic_json_schema__(self, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return handler(core_schema)


class RequestBody(BaseModel):
    """A request body, which accepts unknown fields and reports them as ignored."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True, use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _null_is_default(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        if len(body) > MAX_FIELDS:
            raise PydanticCustomError(TOO_MANY, f"must have at most {MAX_FIELDS} fields, got {len(body)}")
        return {name: value for name, value in body.items() if value is not None} if None in body.values() else body

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        schema = handler(core_schema)
        fields = handler.resolve_ref_schema(schema)
        for name, field in fields.get("properties", {}).items():
            if name not in fields.get("required", ()):
                fields["properties"][name] = or_null(field)
        return schema

    @property
    def request_names(self) -> dict[str, str]:
        """Return this request's names for the engine's fields and ours, where the names differ."""
        return {}

    def name_of(self, field: str) -> str:
        return self.request_names.get(field, field)

    def unknown_fields(self) -> Iterator[str]:
        """Yield the paths of ignored fields, such as `messages[0].weight`."""
        yield from (name for name, mark in marks(type(self), Ignored) if not mark.is_neutral(getattr(self, name)))
        yield from self.model_extra or ()
        yield from (f"{name}.{unknown}" for name, body in self._nested() for unknown in body.unknown_fields())

    def check_neutral(self, within: str = "") -> None:
        """Raise `InvalidField` if an unsupported field has a value that would have an effect."""
        given = self.model_fields_set
        for name, mark in marks(type(self)):
            if name in given:
                mark.check(within + name, getattr(self, name))
        for name, body in self._nested():
            body.check_neutral(f"{within}{name}.")

    def _nested(self) -> "Iterator[tuple[str, RequestBody]]":
        for name, value in self.__dict__.items():
            if isinstance(value, RequestBody):
                yield name, value
            elif isinstance(value, list) and value and isinstance(value[0], RequestBody):
                yield from ((f"{name}[{i}]", item) for i, item in enumerate(value))


@cache
def marks(body: type[RequestBody], kind: type[Unsupported] = Unsupported) -> list[tuple[str, Unsupported]]:
    fields = body.model_fields.items()
    return [(name, mark) for name, field in fields for mark in field.metadata if isinstance(mark, kind)]


def or_null(schema: JsonSchemaValue) -> JsonSchemaValue:
    """Make the schema of a field nullable. Title, description and default stay at the top level."""
    about = {key: value for key, value in schema.items() if key in ("title", "description", "default")}
    kind = {key: value for key, value in schema.items() if key not in about}
    kinds = kind.get("anyOf", [kind])
    return {"anyOf": kinds if {"type": "null"} in kinds else [*kinds, {"type": "null"}], **about}


def described(message: str) -> WrapValidator:
    """Replace the validation errors of all members of a union with one message, unless there are too many items."""

    def validate(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError as error:
            too_many = next((each["msg"] for each in error.errors() if each["type"] == TOO_MANY), None)
            raise PydanticCustomError(TOO_MANY if too_many else "described", too_many or message) from error

    return WrapValidator(validate)


def tagged(by: str, tags: Mapping[str | None, str], message: str) -> Discriminator:
    """Select the member of a union by the tag of the value of field `by`. If it has none, fail with `message`.

    The first member refuses what is not an object. A tag must not equal a field's name: `errors.path` removes tags from
    an error's location.
    """

    def tag_of(value: Any) -> str | None:
        if not isinstance(value, dict):
            return next(iter(tags.values()))
        given = value.get(by)
        return tags.get(given) if isinstance(given, str | None) else None

    return Discriminator(tag_of, custom_error_type=WRONG_FIELD + by, custom_error_message=message)


def encodable(text: str) -> str:
    """Reject lone surrogates, which are valid in JSON but not in UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PydanticCustomError("encodable", "must be valid Unicode") from error
    return text


def encodable_json(value: Any) -> Any:
    """Reject lone surrogates anywhere in a JSON value."""
    try:
        encodable(json.dumps(value, ensure_ascii=False))
    except RecursionError as error:
        raise PydanticCustomError("encodable", "is nested too deeply") from error
    return value


@dataclass(frozen=True)
class MaxItems:
    """Limits a list or object: counts its items before validating them, and a list's validation stops at an error.

    Without limits, pydantic would validate all items, and describe the error of each. Every list needs this mark, and
    every object whose values are validated.
    """

    num_items: int

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema: Any = handler(source)
        kind: Any = {"list": list, "dict": dict}[schema["type"]]
        schema["max_length"] = self.num_items
        if kind is list:
            schema["fail_fast"] = True

        def count(value: Any) -> Any:
            if isinstance(value, kind) and len(value) > self.num_items:
                raise PydanticCustomError(TOO_MANY, f"must have at most {self.num_items} entries, got {len(value)}")
            return value

        return core_schema.no_info_before_validator_function(count, schema)


Text = Annotated[str, AfterValidator(encodable)]
ECHOED = BeforeValidator(encodable_json)
"""Marks a field that the response repeats with its unknown fields."""


def require(condition: bool, param: str, message: str, *, code: str = INVALID) -> None:
    if not condition:
        raise InvalidField(param, message, code=code)
