"""The format of an answer: OpenAI's `response_format` and vLLM's `structured_outputs`."""

from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from server.errors import InvalidField
from server.schemas.body import MaxItems, RequestBody, Text, Unsupported, described, require
from server.schemas.json_text import JsonError, parse_json
from server.structured_outputs.bounds import MAX_CHARACTERS
from server.structured_outputs.grammars import ANY_OBJECT, Grammar, JsonSchema, Lark, OneOf, Regex

FormatName = Annotated[Text, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
SchemaField = Annotated[dict[str, Any] | Text | None, described("must be a JSON schema, as an object or a string")]
Choices = Annotated[list[Text], MaxItems(MAX_CHARACTERS)]


class OutputFormat(NamedTuple):
    """The grammar of an answer, and the request field that sets it."""

    param: str
    grammar: Grammar
    is_text: bool = False
    """Whether the answer is text. Text also ends at the stop strings of the chat template."""


class JsonSchemaFormat(RequestBody):
    name: FormatName
    """`name` and `description` have no effect."""
    description: Text | None = None
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    """By default, any object."""
    strict: bool = False
    """`true`: objects that declare no `properties` must be empty. The schema is enforced either way."""


class ResponseFormat(RequestBody):
    type: Literal["text", "json_object", "json_schema"]
    """`text`, `json_object` or `json_schema`."""
    json_schema: JsonSchemaFormat | None = None
    """Requires type `json_schema`."""
    object_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    """A schema for type `json_object`. For type `json_schema`, an alternative to `json_schema.schema`."""
    value: Annotated[Any, Unsupported(why="; use `json_schema`")] = None
    pattern: Annotated[Any, Unsupported(why="; use `structured_outputs.regex`")] = None
    regex: Annotated[Any, Unsupported(why="; use `structured_outputs.regex`")] = None
    grammar: Annotated[Any, Unsupported(why="; use `structured_outputs.grammar`")] = None

    def output_format(self) -> OutputFormat | None:
        """Return the format, or None for text. Raise `InvalidField` if fields contradict each other."""
        param = "response_format.json_schema"
        has_schema = self.json_schema is not None or (self.type == "json_schema" and self.object_schema is not None)
        require(has_schema == (self.type == "json_schema"), param, "must be given if, and only if, type is json_schema")
        if self.object_schema is not None:
            fits = self.type != "text" and self.json_schema is None
            require(fits, "response_format.schema", "is only allowed with type json_object")
            return OutputFormat("response_format.schema", JsonSchema(self.object_schema))
        if self.type == "text":
            return None
        if self.json_schema is None or self.json_schema.json_schema is None:
            return OutputFormat("response_format", ANY_OBJECT)
        grammar = JsonSchema(self.json_schema.json_schema, is_strict=self.json_schema.strict)
        return OutputFormat(f"{param}.schema", grammar)


class StructuredOutputs(RequestBody):
    """The format of an answer: exactly one of `regex`, `choice`, `json`, `grammar` and `json_object`."""

    regex: Text | None = None
    """A pattern that the whole answer matches, in the syntax of Rust's regex crate."""
    choice: Choices | None = None
    """The answer is one of these texts."""
    json_schema: Annotated[SchemaField, Field(alias="json")] = None
    """A JSON schema, as an object or a string."""
    grammar: Text | None = None
    """A grammar in llguidance's variant of Lark or in llama.cpp's GBNF."""
    json_object: bool | None = None
    """Any JSON object."""
    structural_tag: Annotated[Any, Unsupported()] = None
    whitespace_pattern: Annotated[Any, Unsupported(why=": generated JSON has no whitespace")] = None

    def output_format(self) -> OutputFormat:
        """Return the format. Raise `InvalidField` unless exactly one field is set."""
        given: dict[str, tuple[Any, Callable[[Any], Grammar]]] = {
            "regex": (self.regex, Regex),
            "choice": (self.choice, OneOf),
            "json": (self.json_schema, lambda schema: JsonSchema(as_schema(schema))),
            "grammar": (self.grammar, Lark),
            "json_object": (self.json_object or None, lambda _: ANY_OBJECT),
        }
        names = [name for name, (value, _) in given.items() if value is not None]
        message = "must have exactly one of regex, choice, json, grammar and json_object"
        require(len(names) == 1, "structured_outputs", message)
        value, grammar_of = given[names[0]]
        return OutputFormat(f"structured_outputs.{names[0]}", grammar_of(value))


def as_schema(schema: Any) -> dict[str, Any]:
    """Return the schema, which may be a JSON string. Raise `InvalidField` if it is not a JSON object."""
    if isinstance(schema, dict):
        return schema
    param = "structured_outputs.json"
    try:
        read = parse_json(schema.encode())
    except JsonError as error:
        raise InvalidField(param, f"must be a JSON schema, as an object or a string; it {error}") from error
    require(isinstance(read, dict), param, "must be a JSON object")
    return dict(read)
