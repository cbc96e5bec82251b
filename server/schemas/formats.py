"""The form of an answer: OpenAI's `response_format`, and `structured_outputs` beyond it."""

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from server.errors import InvalidField
from server.generation.grammars import ANY_OBJECT, Grammar, JsonSchema, Lark, OneOf, Regex
from server.schemas.body import NeutralOnly, RequestBody, Text, check, described

FormatName = Annotated[Text, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


Schema = Annotated[dict[str, Any] | Text | None, described("must be a JSON schema, as an object or as text")]
Choices = Annotated[list[Text], Field(fail_fast=True)]


class Form(NamedTuple):
    """The grammar of an answer, and the field that asks for it."""

    param: str
    grammar: Grammar
    is_text: bool = False
    """The answer is text, which also ends where the chat template's turns end."""


class JsonSchemaFormat(RequestBody):
    name: FormatName
    """For the client's own use, like `description`."""
    description: Text | None = None
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    """Without one, any object."""
    strict: bool = False
    """The schema always holds; this also closes objects that declare nothing."""


class ResponseFormat(RequestBody):
    type: Literal["text", "json_object", "json_schema"]
    """`text`, `json_object` or `json_schema`."""
    json_schema: JsonSchemaFormat | None = None
    """With type `json_schema`, and only with it."""
    object_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    """With type `json_object`, a schema; with `json_schema`, in place of the field of this name."""
    value: Annotated[Any, NeutralOnly(why="; `json_schema` is")] = None
    pattern: Annotated[Any, NeutralOnly(why="; `structured_outputs.regex` is")] = None
    regex: Annotated[Any, NeutralOnly(why="; `structured_outputs.regex` is")] = None
    grammar: Annotated[Any, NeutralOnly(why="; `structured_outputs.grammar` is")] = None

    def form(self, *, closes: bool) -> Form | None:
        """None for text. Raises `InvalidField`."""
        param = "response_format.json_schema"
        has_schema = self.json_schema is not None or (self.type == "json_schema" and self.object_schema is not None)
        check(
            has_schema == (self.type == "json_schema"), param, "must be given with type json_schema, and only with it"
        )
        if self.object_schema is not None:
            fits = self.type != "text" and self.json_schema is None
            check(fits, "response_format.schema", "is for type json_object")
            return Form("response_format.schema", JsonSchema(self.object_schema, closes=closes))
        if self.type == "text":
            return None
        if self.json_schema is None or self.json_schema.json_schema is None:
            return Form("response_format", ANY_OBJECT)
        grammar = JsonSchema(self.json_schema.json_schema, closes=closes, is_strict=self.json_schema.strict)
        return Form(f"{param}.schema", grammar)


class StructuredOutputs(RequestBody):
    """Exactly one of the first five."""

    regex: Text | None = None
    """Matches the whole answer, in the syntax of Rust's regex crate."""
    choice: Choices | None = None
    """The answer is one of these texts."""
    json_schema: Annotated[Schema, Field(alias="json")] = None
    """A schema, as an object or as text."""
    grammar: Text | None = None
    """In llguidance's variant of Lark, or in llama.cpp's GBNF."""
    json_object: bool | None = None
    """Any JSON object."""
    structural_tag: Annotated[Any, NeutralOnly()] = None
    whitespace_pattern: Annotated[Any, NeutralOnly(why=": JSON is written without whitespace")] = None

    def form(self, *, closes: bool, param: str = "") -> Form:
        """The form of the one field given, which errors call `param` if it has an older name. Raises `InvalidField`."""
        given: dict[str, Any] = {"regex": self.regex, "choice": self.choice, "json": self.json_schema}
        given |= {"grammar": self.grammar, "json_object": self.json_object or None}
        names = [name for name, value in given.items() if value is not None]
        check(
            len(names) == 1,
            "structured_outputs",
            "must have exactly one of regex, choice, json, grammar and json_object",
        )
        param = param or f"structured_outputs.{names[0]}"
        if self.regex is not None:
            return Form(param, Regex(self.regex))
        if self.choice is not None:
            return Form(param, OneOf(self.choice))
        if self.grammar is not None:
            return Form(param, Lark(self.grammar))
        if self.json_object:
            return Form(param, ANY_OBJECT)
        return Form(param, JsonSchema(as_schema(param, self.json_schema), closes=closes))


GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "regex": "regex",
    "grammar": "grammar",
    "ebnf": "grammar",
}
"""Other names of fields of `structured_outputs`."""


def guided(given: Mapping[str, Any]) -> Iterator[tuple[str, StructuredOutputs]]:
    """Fields given by other names; an empty text is none."""
    for name, value in given.items():
        if value is not None and value != "":
            yield name, StructuredOutputs.model_validate({GUIDED[name]: value})


def as_schema(param: str, schema: Any) -> dict[str, Any]:
    """A schema from an object or from JSON text. Raises `InvalidField` naming the parameter."""
    if isinstance(schema, dict):
        return schema
    try:
        read = json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise InvalidField(param, "must be a JSON schema, as an object or as text") from error
    check(isinstance(read, dict), param, "must be a JSON schema that is an object")
    return dict(read)
