"""What all bodies share: null means the default, unknown fields are named, some fields take neutral values only."""

import json
from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, ValidationError

from server.errors import InvalidField

MAX_FIELDS = 1_000
"""Of one object, known and unknown."""


class NeutralOnly:
    """Marks a field of the protocol that cannot be honoured: null and these values ask for nothing, others are refused.

    `why` ends the sentence "not supported".
    """

    def __init__(self, *values: Any, why: str = "") -> None:
        self.values = values
        self.why = why

    def is_neutral(self, value: Any) -> bool:
        return any(type(value) is type(neutral) and value == neutral for neutral in (*self.values, None))

    def check(self, param: str, value: Any) -> None:
        if not self.is_neutral(value):
            allowed = " or ".join(json.dumps(allowed) for allowed in (*self.values, None))
            raise InvalidField(param, f"not supported{self.why}; only {allowed} is")

    def __get_pydantic_json_schema__(self, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"enum": list(self.values)} if self.values else {"type": "null"}


class Hint(NeutralOnly):
    """Marks a field that changes nothing here: what it asks for is named as not honoured, unless it is neutral."""

    def check(self, param: str, value: Any) -> None:
        """Anything may be hinted at."""

    def __get_pydantic_json_schema__(self, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return handler(core_schema)


class RequestBody(BaseModel):
    """Fields nobody knows are accepted and can be named."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True, use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _null_is_default(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        if len(body) > MAX_FIELDS:
            raise PydanticCustomError("too_many", f"at most {MAX_FIELDS} fields are allowed, got {len(body)}")
        return {name: value for name, value in body.items() if value is not None}

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        schema = handler(core_schema)
        fields = handler.resolve_ref_schema(schema)
        for name, field in fields.get("properties", {}).items():
            if name not in fields.get("required", ()):
                fields["properties"][name] = or_null(field)
        return schema

    @property
    def unknown_fields(self) -> list[str]:
        """Names of the fields not honoured, those of nested objects with a dot."""
        unknown_within = [f"{name}.{unknown}" for name, body in self._nested() for unknown in body.unknown_fields]
        return [*self._hints(), *(self.model_extra or {}), *unknown_within]

    def _hints(self) -> Iterator[str]:
        """Hints that were given."""
        for name, field in type(self).model_fields.items():
            if any(isinstance(mark, Hint) and not mark.is_neutral(getattr(self, name)) for mark in field.metadata):
                yield name

    def check_neutral(self, within: str = "") -> None:
        """Raise `InvalidField` for what is part of the protocol and cannot be honoured."""
        for name, field in type(self).model_fields.items():
            for mark in field.metadata:
                if isinstance(mark, NeutralOnly):
                    mark.check(within + name, getattr(self, name))
        for name, body in self._nested():
            body.check_neutral(f"{within}{name}.")

    def _nested(self) -> "Iterator[tuple[str, RequestBody]]":
        for name in type(self).model_fields:
            value = getattr(self, name)
            if isinstance(value, RequestBody):
                yield name, value
            elif isinstance(value, list):
                yield from ((f"{name}[{i}]", item) for i, item in enumerate(value) if isinstance(item, RequestBody))


class ResponseBody(BaseModel):
    """Fields are sent if they were set, so null is said on purpose.

    What is sent token by token is a `TypedDict` instead, which costs nothing to make and little to write.
    """

    def json_text(self) -> str:
        return self.model_dump_json(exclude_unset=True)


def or_null(schema: JsonSchemaValue) -> JsonSchemaValue:
    """The schema of a field that may also be null; what is said about the field stays outside."""
    about = {key: value for key, value in schema.items() if key in ("title", "description", "default")}
    kind = {key: value for key, value in schema.items() if key not in about}
    kinds = kind.get("anyOf", [kind])
    return {"anyOf": kinds if {"type": "null"} in kinds else [*kinds, {"type": "null"}], **about}


def described(message: str) -> WrapValidator:
    """One plain message in place of one for each member of a union."""

    def validate(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError as error:
            raise PydanticCustomError("described", message) from error

    return WrapValidator(validate)


def encodable(text: str) -> str:
    """JSON can hold halves of surrogate pairs, which are no characters."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PydanticCustomError("encodable", "must be valid Unicode") from error
    return text


def at_most(num_items: int) -> BeforeValidator:
    """Refuses a list or object by its size alone: a long one with something wrong in every item takes seconds."""

    def validate(value: Any) -> Any:
        if isinstance(value, list | dict) and len(value) > num_items:
            raise PydanticCustomError("too_many", f"at most {num_items} entries are allowed, got {len(value)}")
        return value

    return BeforeValidator(validate)


Text = Annotated[str, AfterValidator(encodable)]
Whole = Annotated[int, Field(ge=-(2**63), lt=2**63)]
"""For what is calculated with: JSON's numbers may have more digits than Python prints."""


def check(condition: bool, param: str, message: str) -> None:
    """Raise `InvalidField` naming the parameter unless the condition holds."""
    if not condition:
        raise InvalidField(param, message)
