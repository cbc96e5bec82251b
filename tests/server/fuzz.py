"""Nearly valid requests: valid bodies for every endpoint with random, seeded mutations."""

import gzip
import json
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

from tests.byte_model import NAME
from tests.server.raw_client import JSON, Json, request

SCHEMAS: list[Json] = [
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False},
    {"type": "array", "items": {"enum": ["x", 1, None]}, "maxItems": 2},
    {"anyOf": [{"type": "string", "maxLength": 3}, {"$ref": "#/$defs/n"}], "$defs": {"n": {"type": "null"}}},
]
BAD_SCHEMAS: list[Json] = [{"type": 5}, {"type": "nothing"}, {"not": {}}, {"enum": []}, {"pattern": "("}, {"anyOf": []}]
BAD_SCHEMAS += [{"$ref": reference} for reference in ("#", "http://localhost/x", "#/$defs/a")]
BAD_SCHEMAS += [{"type": "string", "minLength": 10**9}, {"minimum": 2, "maximum": 1}, {"enum": list(range(3_000))}]
BAD_SCHEMAS += [{"type": "number", "multipleOf": 0}, {"allOf": [{"type": "string"}, {"type": "null"}]}]
BAD_SCHEMAS += [{"properties": {str(number): {} for number in range(500)}, "minProperties": 400}]
REGEXES = ["a{1,3}", "[0-9]+(cd)?", "x*"]
BAD_REGEXES = ["", "(", "[", "a{1000000}", "(a{1000}){1000}", "(?=x)", r"\1", r"\p{L}+"]
BAD_REGEXES += ["(a|b|ab)*c{9}", "\ud83e", "(?i)x"]
FORMATS = [{"type": "text"}, {"type": "json_object"}]
FORMATS += [{"type": "json_schema", "json_schema": {"name": "f", "schema": schema}} for schema in SCHEMAS + BAD_SCHEMAS]
STRUCTURES: list[Json] = [{"regex": regex} for regex in REGEXES + BAD_REGEXES]
STRUCTURES += [{"choice": choice} for choice in (["a", "b"], [], [""], ["x"] * 500)]
STRUCTURES += [{"json": schema} for schema in SCHEMAS + BAD_SCHEMAS]
TOOL = {"type": "function", "function": {"name": "look_up", "description": "x", "parameters": SCHEMAS[0]}}

CALL = {"id": "1", "type": "function", "function": {"name": "look_up", "arguments": "{}"}}
MESSAGES: list[list[Json]] = [
    [{"role": "user", "content": "Hello"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
    [
        {"role": "user", "content": "Look up", "name": "me"},
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "1", "content": "<|endoftext|>"},
    ],
]

SCORING = [{"text_offsets": True}, {"probabilities": True}]
GENERATION: dict[str, list[Any]] = {
    "model": [NAME, "default"],
    "max_tokens": [1, 1, 2],
    "temperature": [0, 0.7, 1],
    "top_p": [0.5, 1],
    "top_k": [0, 5],
    "min_p": [0, 0.1],
    "seed": [None, 1, -5],
    "n": [1, 1, 2],
    "stop": ["a", ["b", "cd"], []],
    "stop_token_ids": [[], [7]],
    "logit_bias": [{}, {"5": 3}],
    "presence_penalty": [0, 0.5],
    "frequency_penalty": [0, -0.5],
    "repetition_penalty": [1, 1.2],
    "min_tokens": [0, 1],
    "stream": [False, True],
    "stream_options": [None, {"include_usage": True}],
    "ignore_eos": [True, False],
    "include_stop_str_in_output": [True],
    "return_token_ids": [True],
    "response_format": FORMATS,
    "structured_outputs": STRUCTURES,
    "user": ["me"],
    "nvium": [{}, {"sampling": "mixture"}, {"sampling": "original"}, {"metadata": False}, *SCORING],
}
COMPLETION: dict[str, list[Any]] = GENERATION | {
    "prompt": ["Once", ["a", "b"], [80, 111], [[80], [111, 112]], "", "🦊", "x" * 80],
    "best_of": [None, 2],
    "logprobs": [None, 0, 2],
    "echo": [False, True],
    "suffix": [None, ""],
}
CHAT: dict[str, list[Any]] = GENERATION | {
    "messages": MESSAGES,
    "max_completion_tokens": [1, 2],
    "logprobs": [True, False],
    "top_logprobs": [None, 0, 2],
    "tools": [[], [TOOL]],
    "tool_choice": ["none", "required", "auto", {"type": "function", "function": {"name": "look_up"}}],
    "parallel_tool_calls": [True, False],
    "metadata": [None, {}],
    "reasoning_effort": ["none", "low"],
    "thinking_budget": [-1, 3],
}
RESPONSES: dict[str, list[Any]] = {
    **{name: GENERATION[name] for name in ("model", "temperature", "top_p", "seed", "stream", "user", "nvium")},
    "input": [
        "Hello",
        [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}],
        [
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Look."}]},
            {"type": "function_call", "call_id": "1", "name": "look_up", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": "<|endoftext|>"},
            {"type": "additional_tools", "tools": [{"type": "function", "name": "more"}]},
        ],
    ],
    "instructions": ["Be brief."],
    "previous_response_id": [None, "resp_1"],
    "store": [True, False],
    "max_output_tokens": [1, 1, 2],
    "tools": [[], [{"type": "function", **TOOL["function"]}, {"type": "namespace", "name": "s", "tools": []}]],
    "tool_choice": ["none", "required", "auto", {"type": "function", "name": "look_up"}],
    "parallel_tool_calls": [True, False],
    "text": [{"format": form.get("json_schema", {}) | {"type": form["type"]}} for form in FORMATS],
    "reasoning": [None, {"effort": "low"}],
    "include": [[], ["reasoning.encrypted_content"]],
    "truncation": ["disabled", "auto"],
    "metadata": [None, {}],
}
TOKENIZE: dict[str, list[Any]] = {
    "model": [NAME],
    "prompt": ["Once", "", "🦊"],
    "messages": MESSAGES,
    "tools": [[TOOL]],
    "add_generation_prompt": [True, False],
    "add_special_tokens": [True, False],
}
DETOKENIZE: dict[str, list[Any]] = {"model": [NAME], "tokens": [[], [1, 2], [257, 0], [5] * 900]}

ENDPOINTS: dict[str, tuple[tuple[str, ...], dict[str, list[Any]]]] = {
    "/v1/completions": (("model", "prompt", "max_tokens"), COMPLETION),
    "/v1/chat/completions": (("model", "messages", "max_tokens"), CHAT),
    "/v1/responses": (("model", "input", "max_output_tokens"), RESPONSES),
    "/tokenize": (("prompt",), TOKENIZE),
    "/detokenize": (("tokens",), DETOKENIZE),
}
"""For each path, the fields of every body and mostly valid values for all fields."""

HALF_PAIR = "\ud83e"
ODD_VALUES: list[Any] = [
    *(None, True, False, "", "a", "0", "1e5", "null", "\x00", "a\x00b", HALF_PAIR, HALF_PAIR * 3, "\u202e", "🦊" * 50),
    *("x" * 5_000, "é" * 20_000, "a\r\nset-cookie: b", "../../etc/passwd", "<|endoftext|>" * 3, "{}", "%s%n"),
    *(0, -1, 1, 2, 100, 128, 129, 2**31 - 1, 2**31, 2**53 + 1, 2**63 - 1, 2**63, -(2**63) - 1, 10**30, 10**400),
    *(10**4299, -(10**4299), 0.5, -0.0, 1.0, 1e-320, 1e308, -1e308, float("nan"), float("inf"), float("-inf")),
    *([], {}, [[]], [{}], [None], [True], [""], ["a", 1], [1, "a"], [[1], "a"], [[["a"]]], [0], [256], [257], [-1]),
    *([2**40], [10**30], [1.5], [float("nan")], ["a"] * 1_025, [[1]] * 1_100, [5] * 5_000, list("abcde")),
    *({"": 1}, {"a": None}, {"5": "x"}, {"5": float("nan")}, {"-1": 0}, {"²": 1}, {"5": 1e9}, {"type": "json_object"}),
    *({str(number): 1 for number in range(300)}, {HALF_PAIR: HALF_PAIR}, {"include_usage": 1}, {"sampling": []}),
]

CONTENT_TYPES = ["", "text/plain", "application/xml", "multipart/form-data; boundary=x", "application/json; charset=q"]
CONTENT_TYPES += ["application/x-www-form-urlencoded", "application/vnd.api+json", "application/"]
CONTENT_TYPES += [";", "é", "a" * 3_000]
METHODS = ["GET", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE", "BREW", "post"]
DEEP = ['{"a":', "[", '{"prompt":[', '{"nvium":{"a":']


def nearly_valid_requests(seed: int) -> Iterator[tuple[str, bytes]]:
    """Yield endless requests with their methods."""
    random = Random(seed)
    while True:
        path = random.choice(list(ENDPOINTS))
        content = encoded(body(path, random), random)
        method = random.choice(METHODS) if random.random() < 0.02 else "POST"
        headers = dict(JSON) if random.random() < 0.95 else {"content-type": random.choice(CONTENT_TYPES)}
        if random.random() < 0.02:
            headers["content-encoding"] = random.choice(["gzip", "br", "identity", "?"])
        yield method, request(path, content, method=method, headers=headers, is_chunked=random.random() < 0.1)


def body(path: str, random: Random) -> Json:
    """Draw fields with valid values, then mutate some of them."""
    required, values = ENDPOINTS[path]
    names = {*required, *random.sample(list(values), random.randrange(min(5, len(values))))}
    fields = {name: random.choice(values[name]) for name in values if name in names}
    for _ in range(random.choice([0, 1, 2, 2, 3, 3])):
        mutate(fields, list(values), random)
    return fields


def mutate(fields: Json, names: list[str], random: Random) -> None:
    own = random.choice(list(fields) or names)
    value = fields.get(own)
    match random.choices(["replace", "replace within", "leave out", "add", "wrap"], [2, 2, 1, 1, 1])[0]:
        case "replace":
            fields[random.choice(names)] = odd_value(random)
        case "replace within":
            fields[own] = with_something_odd(value, random)
        case "leave out":
            fields.pop(random.choice(names), None)
        case "add":
            fields[str(random.choice(ODD_VALUES))[:500]] = odd_value(random)
        case _:
            fields[own] = random.choice([[value], {own: value}, [[value] * 3]])


def with_something_odd(value: Any, random: Random) -> Any:
    if not value or not isinstance(value, list | dict) or random.random() < 0.2:
        return odd_value(random)
    copy: Any = value.copy()
    place = random.choice(list(copy) if isinstance(copy, dict) else range(len(copy)))
    copy[place] = with_something_odd(copy[place], random)
    return copy


def odd_value(random: Random) -> Any:
    value = random.choice(ODD_VALUES)
    for _ in range(random.choice([0, 0, 0, 1, 4])):
        value = [value] if random.random() < 0.5 else {"a": value}
    return value


def encoded(fields: Json, random: Random) -> bytes:
    """Encode as JSON, and damage some of the texts."""
    text = json.dumps(fields, ensure_ascii=random.random() < 0.5).encode(errors="surrogatepass")
    return random.choice(list(DAMAGES.values()))(text, random) if random.random() < 0.2 else text


ENCODINGS = ["utf-16", "utf-32-be", "utf-8-sig", "utf-7"]
FRAMES = [b"[%b]", b" \n%b\n ", b"%b%%", b"\x00%b", b"%b,", b'"%b"']
DAMAGES: dict[str, Callable[[bytes, Random], bytes]] = {
    "truncated": lambda text, random: text[: random.randrange(len(text))],
    "with other bytes": lambda text, random: spliced(text, random.randrange(len(text)), random),
    "with doubled keys": lambda text, random: text[:-1] + b", " * (len(text) > 2) + text[1:],
    "in another encoding": lambda text, random: recoded(text, random.choice(ENCODINGS)),
    "compressed": lambda text, random: gzip.compress(text, mtime=0),
    "noise": lambda text, random: random.randbytes(random.randrange(200)),
    "deep": lambda text, random: random.choice(DEEP).encode() * random.choice([10, 500, 20_000]),
    "surrounded": lambda text, random: random.choice(FRAMES) % text,
}


def recoded(text: bytes, encoding: str) -> bytes:
    return text.decode(errors="surrogatepass").encode(encoding, "replace")


def spliced(text: bytes, place: int, random: Random) -> bytes:
    """Replace a few bytes."""
    return text[:place] + random.randbytes(random.randrange(1, 5)) + text[place + random.randrange(5) :]
