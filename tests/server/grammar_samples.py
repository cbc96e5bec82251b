"""JSON schemas, patterns and grammars for the tests of constraints: random, refused and costly ones."""

from typing import Any

from hypothesis import strategies as st

NAMES = ["a", "b", "name", 'quo"te', "ключ"]

FIXED: list[dict[str, Any]] = [{"type": kind} for kind in ("boolean", "null", "number", "string", ["integer", "null"])]
FIXED += [{"type": "string", "pattern": "^[a-c]{1,3}x?$"}, {"type": "string", "format": "date"}]
FIXED += [{"const": {"k": [1, "é"]}}, {}]


def bounded(kind: str, least: str, most: str, low: Any, size: Any, **more: Any) -> st.SearchStrategy[dict[str, Any]]:
    """Draw schemas of a type with two bounds, the keywords `least` and `most`, which are `size` apart."""
    return st.builds(lambda low, size, **more: {"type": kind, least: low, most: low + size, **more}, low, size, **more)


enums = st.lists(st.integers(-5, 5) | st.text(max_size=4), min_size=1, max_size=4)
leaves = st.one_of(
    st.sampled_from(FIXED),
    bounded("integer", "minimum", "maximum", st.integers(-99, 99), st.integers(0, 999)),
    bounded("string", "minLength", "maxLength", st.integers(0, 3), st.integers(0, 5)),
    enums.map(lambda enum: {"enum": enum}),
)


def arrays(items: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return bounded("array", "minItems", "maxItems", st.integers(0, 2), st.integers(0, 2), items=items)


@st.composite
def objects(draw: st.DrawFn, values: st.SearchStrategy[dict[str, Any]]) -> dict[str, Any]:
    properties = draw(st.dictionaries(st.sampled_from(NAMES), values, max_size=3))
    required = [name for name in properties if draw(st.booleans())]
    extra = draw(st.sampled_from([{"additionalProperties": False}] * 3 + [{}]))
    return {"type": "object", "properties": properties, "required": required, **extra}


def unions(members: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.builds(lambda schemas: {"anyOf": schemas}, st.lists(members, min_size=1, max_size=3))


schemas = st.recursive(leaves, lambda of: arrays(of) | objects(of) | objects(of) | unions(of), max_leaves=6)


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """Close objects that declare properties, as the server does by default."""
    by_key = {"items": closed, "anyOf": lambda members: [*map(closed, members)]}
    by_key["properties"] = lambda named: {name: closed(value) for name, value in named.items()}
    read = {key: by_key.get(key, lambda value: value)(value) for key, value in schema.items()}
    return {"additionalProperties": False, **read} if "properties" in schema else read


def chained(number: int, link: Any, last: Any) -> dict[str, Any]:
    """Build a chain of definitions. `link(i, reference to the next)` builds each of them."""
    names = [f"#/$defs/d{i + 1}" for i in range(number)]
    definitions = {f"d{i}": link(i, {"$ref": name}) for i, name in enumerate(names)}
    return {"$defs": {**definitions, f"d{number}": last}, "$ref": "#/$defs/d0"}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def many(number: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"property{i}": {"type": "string"} for i in range(number)}}


def either(number: int) -> dict[str, Any]:
    return {"anyOf": [{"type": "object", "properties": {f"p{number}-{i}": {"type": "string"}}} for i in range(2)]}


STRING = {"type": "string"}
REFUSED_SCHEMAS = {
    "deep": nested(100),
    "very deep": nested(50_000),
    "large": {"title": "x" * 2_000_000},
    "with many properties": many(501),
    "with many patterns": {"allOf": [{"pattern": f"(a|b){{{i}}}.*c{i}"} for i in range(60)], "type": "string"},
    "with patterns in a row": chained(60, lambda i, rest: {**rest, "pattern": f"(a|b){{{i}}}.*c{i}"}, STRING),
    "with a large negative divisor": {"type": "integer", "multipleOf": -1_000_003},
    "with a divisor beyond floats": {"type": "integer", "multipleOf": 10**400},
    "with a divisor that is no number": {"type": "integer", "multipleOf": True},
    "with divisors": {"allOf": [{"multipleOf": 997}, {"multipleOf": 991}]},
    "with divisors and decimals": {"allOf": [{"multipleOf": 0.997}, {"multipleOf": 9910}]},
    "that multiplies": {"allOf": [either(i) for i in range(20)]},
    "that is itself": {"$ref": "#"},
    "that includes itself": {"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}}, "$ref": "#/$defs/a"},
    "for nothing": {"type": "integer", "minimum": 3, "maximum": 2},
    "that refers to nothing": {"$ref": "#/$defs/none"},
    "with a broken pattern": {"type": "string", "pattern": "("},
    "with an infinite bound": {"type": "number", "minimum": float("inf")},
    "with half a character": {"const": "\ud800"},
}

UNION = {"anyOf": [{"type": "array", "items": {"$ref": "#/$defs/n"}, "maxItems": i} for i in range(32)]}
COSTLY_SCHEMAS = {
    "many properties": many(500),
    "a long constant": {"enum": ["x" * 99_000]},
    "a large enumeration": {"enum": [f"v{i}" for i in range(9_000)]},
    "a union of constants": {"anyOf": [{"const": i} for i in range(4_000)]},
    "a large recursive union": {"$defs": {"n": UNION}, "$ref": "#/$defs/n"},
    "long strings": {"type": "string", "minLength": 10**9},
    "long arrays": {"type": "array", "minItems": 10**9, "items": {"type": "array", "minItems": 10**9}},
    "references in a row": chained(2_000, lambda _, rest: rest, {"type": "null"}),
    "references in pairs": chained(500, lambda _, rest: {"allOf": [rest, rest]}, {"type": "null"}),
    "a tree of references": chained(800, lambda _, rest: {"properties": {"a": rest, "b": rest}}, {"type": "null"}),
    "products": {"allOf": [either(i) for i in range(6)]},
    "patterns": {"type": "string", "pattern": "^(a{1000}){1000}$"},
}

REFUSED_PATTERNS = ["", "(", "a(?=b)", r"a\b", r"(a)\1", r"[^\s\S]", "a\\", "*", "a{2,1}", r"\p{Foo}"]
REFUSED_PATTERNS += ["(" * 300 + ")" * 300, "a" * 100_001, "\ud800"]

COSTLY_PATTERNS = ["(a{1000}){1000}", "(((a{100}){100}){100}){100}", "a" * 100_000, r"(.*a.{20}){5}", "(a|aa)*b"]
COSTLY_PATTERNS += ["(x+x+)+y", r"(\w{1,100}\W){1,1000}", "|".join(f"word{i}" for i in range(9_000))]
COSTLY_PATTERNS += [r"[\s\S]{0,100000}"]


def rules(number: int, name: str, defines: str, first: str) -> str:
    """Return a grammar whose rules each refer to the next one."""
    chain = [f'{name}{i}{defines} "a" {name}{i + 1}' for i in range(number)]
    return "\n".join([f"{first}{defines} {name}0", *chain, f'{name}{number}{defines} "b"'])


ALTERNATIVES = " | ".join(f"r{j} r{k}" for j in range(0, 30, 3) for k in range(0, 30, 3)) + " | /[a-z ]/"
COSTLY_GRAMMARS = {
    "rules in a row": rules(6_000, "r", ":", "start"),
    "terminals in a row": rules(6_000, "R", ":", "start"),
    "rules in a row in GBNF": rules(2_000, "r", " ::=", "root"),
    "line breaks": "\n" * 99_000,
    "an ambiguous rule": 'start: x\nx: x x x | x x | /[a-z ]/ | ""',
    "ambiguous rules": "\n".join(["start: r0", *(f"r{i}: {ALTERNATIVES}" for i in range(30))]),
}
"""Lark and GBNF. They once crashed or stalled a server or its grammar processes."""
