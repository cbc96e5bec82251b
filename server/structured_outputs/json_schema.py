"""Rewrites a client's JSON schema for llguidance. The result allows the same JSON, with these exceptions:

- By default, objects that declare `properties` are closed: they allow no other properties. In JSON Schema they are
  open, and a model would invent properties up to its length limit. Schemas merged by `$ref` and `allOf` are closed
  as one object.
- If a property has a different constant in each alternative of `oneOf`, that property is required.
- If a closed schema has alternatives, each alternative forbids the properties that only other alternatives declare.

Independent of tokens, engines and HTTP.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

Schema = Mapping[str, Any]
Names = dict[str, None]

OPEN_SUFFIX = "-merged"
"""Suffix for the name of a definition's open copy. Schemas that merge the definition refer to the open copy."""

LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
NAMED = ("properties", "patternProperties", "dependentSchemas")
SINGLE = ("items", "additionalItems", "additionalProperties", "contains", "not", "if", "then", "else", "propertyNames")
DEFINITIONS = ("$defs", "definitions")
CLOSING = ("additionalProperties", "unevaluatedProperties")
ANNOTATIONS = (
    "title",
    "description",
    "default",
    "examples",
    "deprecated",
    "readOnly",
    "writeOnly",
    "$comment",
    "$schema",
)


class UnusableGrammar(ValueError):
    """A grammar is malformed, unsupported or too large. The message says why."""


class Preparation:
    """Rewrites one schema. `is_strict` is explained at `JsonSchema`."""

    def __init__(self, schema: Schema, *, is_strict: bool) -> None:
        self._schema = schema
        self._is_strict = is_strict
        self._num_visits = 0
        self._merged_references: set[str] = set()
        """References whose definitions need an open copy."""

    def root(self) -> dict[str, Any]:
        """Return the schema to compile. Raise `UnusableGrammar` if it merges too many schemas."""
        ready: dict[str, Any] = self._prepare(self._schema)
        for key in DEFINITIONS:
            if isinstance(definitions := self._schema.get(key), Mapping):
                ready[key] = {name: self._prepare(body) for name, body in definitions.items()}
        while self._merged_references:
            reference = self._merged_references.pop()
            _, key, name = reference.split("/", 2)
            found, copies = target(self._schema, reference), ready.get(key, {})
            if found is not None and name + OPEN_SUFFIX not in copies:
                copies[name + OPEN_SUFFIX] = self._prepare(found, is_merged=True)
        return ready

    def _prepare(self, node: Any, *, is_merged: bool = False) -> Any:
        """Rewrite a schema. If it is merged into another schema, leave it open: the other schema is closed.

        If `node` is not a schema, return it unchanged. llguidance will reject it.
        """
        if not is_object(node):
            return node
        members = listed(node, "allOf")
        is_wrapper = len(members) == 1 and isinstance(members[0], Mapping) and not set(node) - {"allOf", *ANNOTATIONS}
        if is_wrapper and members[0]:
            return self._prepare(members[0], is_merged=is_merged)
        merges = is_merged or "allOf" in node or ("$ref" in node and "properties" in node)
        ready = {key: self._part(node, key, value, merges) for key, value in node.items() if key not in DEFINITIONS}
        if "anyOf" not in ready and (tag := self._tag(listed(node, "oneOf"))):
            ready["anyOf"] = [with_required(tag, alternative) for alternative in ready.pop("oneOf")]
        return ready if is_merged else self._closed(node, ready)

    def _part(self, node: Schema, key: str, value: Any, merges: bool) -> Any:
        if key == "$ref" and merges and isinstance(value, str) and value.startswith(("#/$defs/", "#/definitions/")):
            self._merged_references.add(value)
            return value + OPEN_SUFFIX
        has_branches = key in ("anyOf", "oneOf")
        are_merged = key == "allOf" or (has_branches and (merges or "properties" in node))
        prepared = rebuilt(key, value, lambda _, child: self._prepare(child, is_merged=are_merged))
        return self._apart(node, value, prepared) if has_branches and isinstance(value, list) else prepared

    def _apart(self, node: Schema, alternatives: list[Any], ready: list[Any]) -> list[Any]:
        """If the schema is closed, forbid in each alternative the properties that only other alternatives declare."""
        is_open = any(key in node for key in (*CLOSING, "patternProperties"))
        if is_open or "properties" not in node:
            return ready
        own = [self._named(child) for child in alternatives]
        among = dict.fromkeys(name for names in own for name in names if name not in node["properties"])
        return [
            closed | {"properties": {name: False for name in among if name not in names} | closed.get("properties", {})}
            if is_object(closed) and among.keys() - names.keys()
            else closed
            for closed, names in zip(ready, own, strict=True)
        ]

    def _named(self, node: Any) -> Names:
        """Return the properties that a schema and its merged schemas declare or require."""
        if not isinstance(node, Mapping):
            return {}
        required = [name for member in self._merged(node) for name in listed(member, "required")]
        return (self._declared(node)[0] or {}) | dict.fromkeys(map(str, required))

    def _tag(self, alternatives: list[Any]) -> str | None:
        """Find a property that has a different constant in each alternative. Return its name or None.

        llguidance treats the alternatives as exclusive only if all of them require that property.
        """
        resolved = [self._resolved(alternative) for alternative in alternatives]
        names = declared(resolved[0]) if resolved else {}
        return next((name for name in names if self._differs(resolved, name)), None)

    def _differs(self, alternatives: list[Schema], name: str) -> bool:
        seen = set[str]()
        for alternative in alternatives:
            self._visit()
            values = constants(declared(alternative).get(name))
            if values is None or values & seen:
                return False
            seen |= values
        return True

    def _closed(self, node: Schema, ready: dict[str, Any]) -> dict[str, Any]:
        if set(node) - {*ANNOTATIONS, *DEFINITIONS} == {"$ref"}:
            return ready
        names, is_open = self._declared(node)
        if is_open or names is None:
            return ready
        any_value: dict[str, Any] = {name: {} for name in names}
        return ready | {"properties": {**any_value, **declared(ready)}, "additionalProperties": False}

    def _declared(self, node: Schema) -> tuple[Names | None, bool]:
        """Return the properties that a schema and its merged schemas declare, and whether one of them is open."""
        members = list(self._merged(node))
        declaring = [member for member in members if isinstance(member.get("properties"), Mapping)]
        keys = (*CLOSING, "patternProperties")
        is_open = any(key in member for member in members for key in keys) or any(map(branches, members[1:]))
        is_strict = self._is_strict and node.get("type") == "object"
        names = {name: None for member in declaring for name in member["properties"]}
        return (names if declaring or is_strict else None), is_open

    def _merged(self, node: Schema) -> Iterator[Schema]:
        """Yield the node and every schema merged into it. If the node has `properties`, merge its alternatives too."""
        waiting, seen = [node], set[int]()
        while waiting:
            member = waiting.pop(0)
            if id(member) in seen:
                continue
            seen.add(id(member))
            self._visit()
            yield member
            own_branches = branches(node) if member is node and "properties" in node else []
            children = [target(self._schema, member.get("$ref")), *listed(member, "allOf"), *own_branches]
            waiting += [child for child in children if isinstance(child, Mapping)]

    def _visit(self) -> None:
        self._num_visits += 1
        if self._num_visits > 500_000:
            raise UnusableGrammar("merges too many schemas")

    def _resolved(self, node: Any) -> Schema:
        found = target(self._schema, node.get("$ref")) if isinstance(node, Mapping) and "$ref" in node else node
        return found if isinstance(found, Mapping) else {}


def rebuilt(key: str, value: Any, change: Callable[[str, Any], Any]) -> Any:
    """Apply `change` to the subschemas in a keyword's value. `change` receives each with its path in the schema."""
    if key in (*NAMED, *DEFINITIONS) and isinstance(value, Mapping):
        return {name: change(f"{key}.{name}", child) for name, child in value.items()}
    if key in (*LISTS, *SINGLE) and isinstance(value, list):
        return [change(f"{key}.{number}", child) for number, child in enumerate(value)]
    return change(key, value) if key in SINGLE else value


def target(schema: Schema, reference: Any) -> Any:
    """Return the target of a `$ref` within the document, or None if it does not exist."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return schema if reference == "#" else None
    found: Any = schema
    for part in reference[2:].split("/"):
        name = part.replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def is_object(node: Any) -> bool:
    return isinstance(node, Mapping) and isinstance(node.get("properties", {}), Mapping)


def declared(node: Schema) -> Mapping[str, Any]:
    properties = node.get("properties")
    return properties if isinstance(properties, Mapping) else {}


def listed(node: Schema, key: str) -> list[Any]:
    value = node.get(key)
    return value if isinstance(value, list) else []


def branches(node: Schema) -> list[Any]:
    return [*listed(node, "anyOf"), *listed(node, "oneOf")]


def with_required(name: str, node: Any) -> Any:
    required = listed(node, "required")
    return node if name in required else node | {"required": [*required, name]}


def constants(schema: Any) -> set[str] | None:
    """Return the values of `const` or `enum` as JSON texts. If the schema has neither, return None."""
    if not isinstance(schema, Mapping):
        return None
    if "const" in schema:
        return {json.dumps(schema["const"], sort_keys=True)}
    listed = schema.get("enum")
    return {json.dumps(value, sort_keys=True) for value in listed} if isinstance(listed, list) else None
