"""What form an answer shall have: `response_format` as OpenAI has it, and `structured_outputs` beyond it."""

import json
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from server.errors import InvalidField
from server.generation.grammars import ANY_OBJECT, Choice, Grammar, JsonSchema, Regex
from server.schemas.body import RequestBody, Text, check, described

FormatName = Annotated[Text, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class Form(NamedTuple):
    """A form asked for, and the field that asks for it."""

    param: str
    grammar: Grammar


class JsonSchemaFormat(RequestBody):
    name: FormatName
    """For the client's own use, as is `description`."""
    description: Text | None = None
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    """Without one, any object."""
    strict: bool = False
    """The schema always holds; this also closes objects that declare nothing."""


class ResponseFormat(RequestBody):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None
    """With type `json_schema`, and only with it."""

    def form(self, *, closes: bool) -> Form | None:
        """None for text. Raises `InvalidField`."""
        param = "response_format.json_schema"
        has_schema = self.json_schema is not None
        check(
            has_schema == (self.type == "json_schema"), param, "must be given with type json_schema, and only with it"
        )
        if self.type == "text":
            return None
        if self.json_schema is None or self.json_schema.json_schema is None:
            return Form("response_format", ANY_OBJECT)
        grammar = JsonSchema(self.json_schema.json_schema, closes=closes, is_strict=self.json_schema.strict)
        return Form(f"{param}.schema", grammar)


class StructuredOutputs(RequestBody):
    """Exactly one of the three."""

    regex: Text | None = None
    """Matches the whole answer, in the syntax of Rust's regex crate."""
    choice: Annotated[list[Text], Field(fail_fast=True)] | None = None
    json_schema: Annotated[
        dict[str, Any] | Text | None, Field(alias="json"), described("must be a JSON schema, as an object or as text")
    ] = None
    """A schema, as an object or as text."""

    def form(self, *, closes: bool) -> Form:
        """Raises `InvalidField`."""
        given = [self.regex, self.choice, self.json_schema]
        is_one = sum(value is not None for value in given) == 1
        check(is_one, "structured_outputs", "must have exactly one of regex, choice and json")
        if self.regex is not None:
            return Form("structured_outputs.regex", Regex(self.regex))
        if self.choice is not None:
            return Form("structured_outputs.choice", Choice(self.choice))
        schema = as_schema("structured_outputs.json", self.json_schema)
        return Form("structured_outputs.json", JsonSchema(schema, closes=closes))


def as_schema(param: str, schema: Any) -> dict[str, Any]:
    """The object that a text holds. Raises `InvalidField` naming the parameter."""
    if isinstance(schema, dict):
        return schema
    try:
        read = json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise InvalidField(param, "must be a JSON schema, as an object or as text") from error
    check(isinstance(read, dict), param, "must be a JSON schema that is an object")
    return dict(read)
