"""Base classes of all bodies: null means the default, and unknown fields are accepted and reported."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated, Any, ClassVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetJsonSchemaHandler,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, ValidationError

from server.errors import WRONG_FIELD, InvalidField

MAX_FIELDS = 1_000
"""Maximum number of fields in a JSON object of a request."""


class NeutralOnly:
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
            raise InvalidField(param, f"not supported{self.why}; must be {allowed}")

    def __get_pydantic_json_schema__(self, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"enum": list(self.values)} if self.values else {"type": "null"}


class WithoutEffect(NeutralOnly):
    """Marks a field that accepts any value and has no effect, because the server always behaves as the field asks."""

    def check(self, param: str, value: Any) -> None:
        """Accept any value."""

    def __get_pydantic_json_schema__(self, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return handler(core_schema)


class Hint(WithoutEffect):
    """Marks a field that is ignored. If its value is not neutral, the field is named in `x-nvium-ignored-params`."""


class RequestBody(BaseModel):
    """A request body, which accepts unknown fields and reports them as ignored."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True, use_attribute_docstrings=True)

    aliases: ClassVar[Mapping[str, str]] = {}
    """Maps an alias to its field."""

    @model_validator(mode="before")
    @classmethod
    def _null_is_default(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        if len(body) > MAX_FIELDS:
            raise PydanticCustomError("too_many", f"must have at most {MAX_FIELDS} fields, got {len(body)}")
        given = {name: value for name, value in body.items() if value is not None}
        for name, own in cls.resolved_aliases(given).items():
            if given.setdefault(own, given[name]) != given[name]:
                message = f"must equal {own}, because it is an alias of {own}"
                raise PydanticCustomError(WRONG_FIELD + name, message)
        return given

    @classmethod
    def resolved_aliases(cls, given: Iterable[str]) -> dict[str, str]:
        """Return the aliases among these names, each with its field."""
        names = {name: cls.aliases[name] for name in given if name in cls.aliases and name not in cls.model_fields}
        return {name: own for name, own in names.items() if own in cls.model_fields}

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
        """Return the paths of ignored fields, such as `messages[0].weight`."""
        unknown_within = [f"{name}.{unknown}" for name, body in self._nested() for unknown in body.unknown_fields]
        extra = self.model_extra or {}
        known = self.resolved_aliases(extra)
        return [*self._hints(), *(name for name in extra if name not in known), *unknown_within]

    def _hints(self) -> Iterator[str]:
        for name, field in type(self).model_fields.items():
            if any(isinstance(mark, Hint) and not mark.is_neutral(getattr(self, name)) for mark in field.metadata):
                yield name

    def check_neutral(self, within: str = "") -> None:
        """Raise `InvalidField` if an unsupported field has a value that would have an effect."""
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
    """A response body that serializes only the fields that were set.

    Bodies with tokens are `TypedDict`s instead, which are cheaper to create and to serialize.
    """

    def json_text(self) -> str:
        return self.model_dump_json(exclude_unset=True)


def or_null(schema: JsonSchemaValue) -> JsonSchemaValue:
    """Make the schema of a field nullable. Title, description and default stay at the top level."""
    about = {key: value for key, value in schema.items() if key in ("title", "description", "default")}
    kind = {key: value for key, value in schema.items() if key not in about}
    kinds = kind.get("anyOf", [kind])
    return {"anyOf": kinds if {"type": "null"} in kinds else [*kinds, {"type": "null"}], **about}


def described(message: str) -> WrapValidator:
    """Replace the validation errors of all members of a union with one message."""

    def validate(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError as error:
            raise PydanticCustomError("described", message) from error

    return WrapValidator(validate)


def tagged(kind: Callable[[Any], str | None], message: str, by: str = "") -> Discriminator:
    """Select the member of a union by the tag that `kind` returns. If `kind` returns None, fail with `message`.

    `by` is the field that the error names. A tag must not equal a field's name: `errors.path` removes tags from an
    error's location.
    """
    return Discriminator(kind, custom_error_type=WRONG_FIELD + by, custom_error_message=message)


def encodable(text: str) -> str:
    """Reject lone surrogates, which are valid in JSON but not in UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PydanticCustomError("encodable", "must be valid Unicode") from error
    return text


def at_most(num_items: int) -> BeforeValidator:
    """Limit the size of a list or object before its items are validated. Validating many invalid items takes long."""

    def validate(value: Any) -> Any:
        if isinstance(value, list | dict) and len(value) > num_items:
            raise PydanticCustomError("too_many", f"must have at most {num_items} entries, got {len(value)}")
        return value

    return BeforeValidator(validate)


Text = Annotated[str, AfterValidator(encodable)]
Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
"""A 64-bit integer. Without a limit, an integer in JSON could be too long for Python to print."""


def check(condition: bool, param: str, message: str) -> None:
    """Raise `InvalidField` for this parameter unless the condition holds."""
    if not condition:
        raise InvalidField(param, message)
