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
    """Says nothing new: the schema always holds."""


class ResponseFormat(RequestBody):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None
    """With type `json_schema`, and only with it."""

    def form(self) -> Form | None:
        """None for text. Raises `InvalidField`."""
        param = "response_format.json_schema"
        has_schema = self.json_schema is not None
        check(
            has_schema == (self.type == "json_schema"), param, "must be given with type json_schema, and only with it"
        )
        if self.type == "text":
            return None
        schema = None if self.json_schema is None else self.json_schema.json_schema
        return Form("response_format", ANY_OBJECT) if schema is None else Form(f"{param}.schema", JsonSchema(schema))


class StructuredOutputs(RequestBody):
    """Exactly one of the three."""

    regex: Text | None = None
    """Matches the whole answer, in the syntax of Rust's regex crate."""
    choice: Annotated[list[Text], Field(fail_fast=True)] | None = None
    json_schema: Annotated[
        dict[str, Any] | Text | None, Field(alias="json"), described("must be a JSON schema, as an object or as text")
    ] = None
    """A schema, as an object or as text."""

    def form(self) -> Form:
        """Raises `InvalidField`."""
        given = [self.regex, self.choice, self.json_schema]
        is_one = sum(value is not None for value in given) == 1
        check(is_one, "structured_outputs", "must have exactly one of regex, choice and json")
        if self.regex is not None:
            return Form("structured_outputs.regex", Regex(self.regex))
        if self.choice is not None:
            return Form("structured_outputs.choice", Choice(self.choice))
        return Form("structured_outputs.json", JsonSchema(as_schema("structured_outputs.json", self.json_schema)))


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
