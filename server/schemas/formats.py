"""What form the text shall have: `response_format` as OpenAI has it, and `structured_outputs` beyond it."""

from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from server.schemas.body import RequestBody, Text, check, described


class Form(NamedTuple):
    """A form asked for, by the field that did."""

    param: str
    kind: Literal["json_object", "json_schema", "regex", "choice"]
    value: Any = None


class JsonSchemaFormat(RequestBody):
    """`strict` says nothing new: the schema always holds. Name and description are for the client's own use."""

    name: Annotated[Text, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: Text | None = None
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool = False


class ResponseFormat(RequestBody):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    def form(self) -> Form | None:
        """The form asked for; a schema that is not there is any object."""
        param = "response_format.json_schema"
        has_schema = self.json_schema is not None
        check(has_schema == (self.type == "json_schema"), param, "goes with type json_schema, and only with it")
        if self.type == "text":
            return None
        schema = None if self.json_schema is None else self.json_schema.json_schema
        return (
            Form("response_format", "json_object") if schema is None else Form(f"{param}.schema", "json_schema", schema)
        )


class StructuredOutputs(RequestBody):
    regex: Text | None = None
    choice: Annotated[list[Text], Field(fail_fast=True)] | None = None
    json_schema: Annotated[
        dict[str, Any] | Text | None, Field(alias="json"), described("must be a JSON schema, as an object or as text")
    ] = None

    def form(self) -> Form:
        asked = [
            Form("structured_outputs.regex", "regex", self.regex),
            Form("structured_outputs.choice", "choice", self.choice),
            Form("structured_outputs.json", "json_schema", self.json_schema),
        ]
        given = [form for form in asked if form.value is not None]
        check(len(given) == 1, "structured_outputs", "must have exactly one of regex, choice and json")
        return given[0]
