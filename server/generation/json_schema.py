"""Prepares a client's JSON schema for llguidance. It describes the same texts, with these exceptions:

- Objects that declare `properties` are closed unless they say otherwise. Open, as JSON Schema has it, they let a model
  invent keys until its length runs out. Objects merged by `$ref` and `allOf` count as one.
- A `format` that llguidance cannot check is an annotation.
- `uniqueItems` is enforced where the items have only a few values, by listing all arrays of them; elsewhere it is an
  annotation, and `may_repeat` says so.
- `oneOf` whose alternatives exclude each other is `anyOf`. Where a constant property tells them apart, it is required.
- Alternatives beside declared `properties` exclude the properties that only other alternatives declare.
- A pattern of `patternProperties` that matches only a few names becomes these properties, which cannot be repeated.

Knows no tokens, engines or HTTP.
"""

import json
import re
from collections.abc import Iterator, Mapping
from itertools import combinations, permutations
from typing import Any

from server.generation.finite_pattern import texts_of

Schema = Mapping[str, Any]
Names = dict[str, None]

FORMATS = frozenset(
    ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown", "uri", "uuid")
)
"""Formats that llguidance checks."""

OPEN_SUFFIX = "-merged"
"""Marks the copy of a definition that is left open, for schemas that merge it."""

OPEN_REFERENCE = re.compile(rf'"\$ref": "([^"]*{OPEN_SUFFIX})"')

MAX_VISITS = 500_000
"""Of schemas, while following what is merged."""

MAX_EXCLUSIVE = 100
"""Alternatives that are compared with each other."""

MAX_DISTINCT = 5
"""Values of items whose arrays without repetition are listed: 326 of them."""

LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
NAMED = ("properties", "patternProperties", "dependentSchemas")
SINGLE = ("items", "additionalItems", "additionalProperties", "contains", "not", "if", "then", "else", "propertyNames")
DEFINITIONS = ("$defs", "definitions")
OF_DISTINCT = ("type", "items", "uniqueItems", "minItems", "maxItems")
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


class SchemaTooLarge(ValueError):
    """The schema merges too many others."""


def prepared(schema: Schema, *, closes: bool = True, is_strict: bool = False) -> dict[str, Any]:
    """The schema to compile. `is_strict` also closes objects that declare nothing. Raises `SchemaTooLarge`."""
    return Preparation(schema, closes=closes, is_strict=is_strict).root()


class Preparation:
    def __init__(self, schema: Schema, *, closes: bool, is_strict: bool) -> None:
        self._schema = schema
        self._closes = closes
        self._is_strict = is_strict
        self._num_visits = 0

    def root(self) -> dict[str, Any]:
        ready: dict[str, Any] = self._prepare(self._schema)
        for key in DEFINITIONS:
            if isinstance(definitions := self._schema.get(key), Mapping):
                closed = {name: self._prepare(body) for name, body in definitions.items()}
                opened = {name + OPEN_SUFFIX: self._prepare(body, is_merged=True) for name, body in definitions.items()}
                ready[key] = closed | needed(opened, [ready, closed])
        return ready

    def may_repeat(self) -> bool:
        """Whether items of some array are asked to be unique and cannot be held to it."""
        return any(node.get("uniqueItems") is True and not self._is_distinct(node) for node in objects(self._schema))

    def _is_distinct(self, node: Schema) -> bool:
        return node.get("maxItems") in (0, 1) or self._distinct(node) is not None

    def _distinct(self, node: Schema) -> list[list[Any]] | None:
        """All arrays without repetition; None where they are not asked for, or too many."""
        if node.get("uniqueItems") is not True or set(node) - {*OF_DISTINCT, *ANNOTATIONS, *DEFINITIONS}:
            return None
        values = constants(self._resolved(node.get("items")))
        if node.get("type") != "array" or values is None or len(values) > MAX_DISTINCT:
            return None
        items = [json.loads(value) for value in sorted(values)]
        least, most = node.get("minItems", 0), node.get("maxItems", len(items))
        if not (isinstance(least, int) and isinstance(most, int)):
            return None
        lengths = range(least, min(len(items), most) + 1)
        return [list(chosen) for length in lengths for chosen in permutations(items, length)]

    def _prepare(self, node: Any, *, is_merged: bool = False) -> Any:
        """A prepared schema. One that is merged stays open; the schema that merges it is closed instead. What is no
        schema is left as it is, to be refused."""
        if not is_object(node):
            return node
        if only := only_member(node):
            return self._prepare(only, is_merged=is_merged)
        if (distinct := self._distinct(node)) is not None:
            return {"enum": distinct}
        node = self._with_names_for_patterns(node)
        merges = is_merged or "allOf" in node or ("$ref" in node and "properties" in node)
        ready = {key: self._part(node, key, value, merges) for key, value in node.items() if is_kept(key, value)}
        if "oneOf" in ready and "anyOf" not in ready and self._are_disjoint(node["oneOf"]):
            ready["anyOf"] = self._tagged(node["oneOf"], ready.pop("oneOf"))
        return ready if is_merged else self._closed(node, ready)

    def _part(self, node: Schema, key: str, value: Any, merges: bool) -> Any:
        if key in NAMED and isinstance(value, Mapping):
            return {name: self._prepare(child) for name, child in value.items()}
        if key in LISTS and isinstance(value, list):
            are_merged = key == "allOf" or (key != "prefixItems" and (merges or "properties" in node))
            prepared = [self._prepare(child, is_merged=are_merged) for child in value]
            return self._apart(node, value, prepared) if key in ("anyOf", "oneOf") else prepared
        if key in SINGLE:
            return [*map(self._prepare, value)] if isinstance(value, list) else self._prepare(value)
        if key == "$ref" and merges and isinstance(value, str) and value.startswith(("#/$defs/", "#/definitions/")):
            return value + OPEN_SUFFIX
        return value

    def _apart(self, node: Schema, alternatives: list[Any], ready: list[Any]) -> list[Any]:
        """The alternatives, each without the properties that only others declare, if the schema is to be closed."""
        is_open = any(key in node for key in (*CLOSING, "patternProperties"))
        if not self._closes or is_open or "properties" not in node:
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
        """The properties that a schema declares or requires, with those that it merges."""
        if not isinstance(node, Mapping):
            return {}
        required = [name for member in self._merged(node) for name in listed(member, "required")]
        return (self._declared(node)[0] or {}) | dict.fromkeys(map(str, required))

    def _tagged(self, alternatives: list[Any], ready: list[Any]) -> list[Any]:
        """The alternatives with a tag that tells them apart required, where one does and none else does."""
        resolved = [self._resolved(alternative) for alternative in alternatives]
        if all(exclude(one, other) for one, other in combinations(resolved, 2)):
            return ready
        tag = next(tag for tag in declared(resolved[0]) if tells_apart(resolved, tag))
        return [closed | {"required": [*dict.fromkeys([*listed(closed, "required"), tag])]} for closed in ready]

    def _closed(self, node: Schema, ready: dict[str, Any]) -> dict[str, Any]:
        if not self._closes or set(node) - {*ANNOTATIONS, *DEFINITIONS} == {"$ref"}:
            return ready
        names, is_open = self._declared(node)
        if is_open or names is None:
            return ready
        any_value: dict[str, Any] = {name: {} for name in names}
        return ready | {"properties": {**any_value, **declared(ready)}, "additionalProperties": False}

    def _declared(self, node: Schema) -> tuple[Names | None, bool]:
        """The properties of a schema and all that it merges (None: none declared), and whether any says it is open."""
        members = list(self._merged(node))
        declaring = [member for member in members if isinstance(member.get("properties"), Mapping)]
        keys = (*CLOSING, "patternProperties")
        is_open = any(key in member for member in members for key in keys) or any(map(branches, members[1:]))
        is_strict = self._is_strict and node.get("type") == "object"
        names = {name: None for member in declaring for name in member["properties"]}
        return (names if declaring or is_strict else None), is_open

    def _merged(self, node: Schema) -> Iterator[Schema]:
        """The node, then every schema that applies to the same value; alternatives only beside declared properties."""
        waiting, seen = [node], set[int]()
        while waiting:
            member = waiting.pop(0)
            if id(member) in seen:
                continue
            seen.add(id(member))
            self._num_visits += 1
            if self._num_visits > MAX_VISITS:
                raise SchemaTooLarge("it merges too many schemas")
            yield member
            own_branches = branches(node) if member is node and "properties" in node else []
            children = [self._target(member.get("$ref")), *listed(member, "allOf"), *own_branches]
            waiting += [child for child in children if isinstance(child, Mapping)]

    def _target(self, reference: Any) -> Any:
        """The target of a `$ref` inside the document; None if it cannot be followed."""
        if not isinstance(reference, str) or not reference.startswith("#/"):
            return self._schema if reference == "#" else None
        found: Any = self._schema
        for part in reference[2:].split("/"):
            name = part.replace("~1", "/").replace("~0", "~")
            found = found.get(name) if isinstance(found, Mapping) else None
        return found

    def _with_names_for_patterns(self, node: Schema) -> Schema:
        patterns = node.get("patternProperties")
        if not isinstance(patterns, Mapping):
            return node
        names = {pattern: texts_of(pattern) for pattern in patterns}
        named = {name: child for pattern, child in patterns.items() for name in names[pattern]}
        left = {pattern: child for pattern, child in patterns.items() if not names[pattern]}
        if len(named) < sum(map(len, names.values())):
            return node
        if named.keys() & declared(node).keys():
            return node
        own = {key: value for key, value in node.items() if key != "patternProperties"}
        more = {"patternProperties": left} if left else {}
        is_closed = (
            {} if any(key in node for key in CLOSING) or "properties" in node else {"additionalProperties": True}
        )
        return {**own, "properties": {**declared(node), **named}, **is_closed, **more}

    def _are_disjoint(self, alternatives: Any) -> bool:
        """Whether no value can match two of them. False also where that is not known."""
        if not isinstance(alternatives, list) or len(alternatives) > MAX_EXCLUSIVE:
            return False
        resolved = [self._resolved(alternative) for alternative in alternatives]
        tags = declared(resolved[0]) if resolved else {}
        return all(exclude(one, other) for one, other in combinations(resolved, 2)) or any(
            tells_apart(resolved, tag) for tag in tags
        )

    def _resolved(self, node: Any) -> Schema:
        """The node, or the definition that it refers to."""
        target = self._target(node.get("$ref")) if isinstance(node, Mapping) and "$ref" in node else node
        return target if isinstance(target, Mapping) else {}


def may_repeat(schema: Any) -> bool:
    """Whether `uniqueItems` is an annotation somewhere in it, if it is a schema."""
    return isinstance(schema, Mapping) and Preparation(schema, closes=True, is_strict=False).may_repeat()


def objects(node: Any) -> Iterator[Mapping[str, Any]]:
    """Every object within one, itself among them."""
    waiting = [node]
    while waiting:
        node = waiting.pop()
        if isinstance(node, Mapping):
            yield node
            waiting += node.values()
        elif isinstance(node, list):
            waiting += node


def only_member(node: Schema) -> Schema | None:
    """The member of an `allOf` that only annotates it."""
    members = node.get("allOf")
    is_wrapper = isinstance(members, list) and len(members) == 1 and not set(node) - {"allOf", *ANNOTATIONS}
    return members[0] if is_wrapper and isinstance(members, list) and isinstance(members[0], Mapping) else None


def needed(definitions: Mapping[str, Any], users: list[Any]) -> dict[str, Any]:
    """The definitions that are referred to, directly or by each other."""
    found: dict[str, Any] = {}
    while users:
        names = {name.rsplit("/", 1)[-1] for name in OPEN_REFERENCE.findall(json.dumps(users))}
        users = [definitions[name] for name in names if name in definitions and name not in found]
        found |= {name: definitions[name] for name in names if name in definitions}
    return found


def is_object(node: Any) -> bool:
    """Whether it is a schema whose properties, if any, are declared as such."""
    return isinstance(node, Mapping) and isinstance(node.get("properties", {}), Mapping)


def declared(node: Schema) -> Mapping[str, Any]:
    """Its properties by name."""
    properties = node.get("properties")
    return properties if isinstance(properties, Mapping) else {}


def listed(node: Schema, key: str) -> list[Any]:
    value = node.get(key)
    return value if isinstance(value, list) else []


def branches(node: Schema) -> list[Any]:
    """A schema's alternatives."""
    return [*listed(node, "anyOf"), *listed(node, "oneOf")]


def is_kept(key: str, value: Any) -> bool:
    is_annotation = key == "format" and isinstance(value, str) and value not in FORMATS
    return not is_annotation and key not in ("uniqueItems", *DEFINITIONS)


def exclude(one: Schema, other: Schema) -> bool:
    """Whether the two are constants, types or tagged objects without a common value."""
    values, others = constants(one), constants(other)
    if values is not None and others is not None:
        return not values & others
    types, other_types = one.get("type"), other.get("type")
    if isinstance(types, str) and isinstance(other_types, str) and types != other_types:
        return {types, other_types} != {"integer", "number"}
    tags = (tag for tag in listed(one, "required") if tag in listed(other, "required"))
    return any(tag_excludes(one, other, tag) for tag in tags)


def tells_apart(alternatives: list[Schema], tag: str) -> bool:
    """Whether a property of all of these objects has other constants in each."""
    are_objects = all(one.get("type") == "object" for one in alternatives)
    return are_objects and all(tag_excludes(one, other, tag) for one, other in combinations(alternatives, 2))


def tag_excludes(one: Schema, other: Schema, tag: str) -> bool:
    values, others = (constants(declared(schema).get(tag, {})) for schema in (one, other))
    return values is not None and others is not None and not values & others


def constants(schema: Any) -> set[str] | None:
    """The values that a schema lists, as text."""
    if not isinstance(schema, Mapping):
        return None
    if "const" in schema:
        return {json.dumps(schema["const"], sort_keys=True)}
    listed = schema.get("enum")
    return {json.dumps(value, sort_keys=True) for value in listed} if isinstance(listed, list) else None
