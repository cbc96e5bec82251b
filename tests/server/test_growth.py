"""Reading grows no faster than what is read, right or wrong: each reader gets n and 4 n bytes of every shape.

Processor time of the reading thread is measured, because that is how long other clients wait. The least of several
tries counts, so a busy machine does not make a test fail.
"""

import asyncio
import gc
import json
import math
import random
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import h11
import pytest

import server.http.bodies
from nvium_core.text.tokenizer_trial import TEXTS, error_of
from server.http.connections import MAX_HEAD_BYTES, Parser
from tests.server.validating_app import BODIES, answer, validating_app

MAX_BODY_BYTES = 1_990_000
SMALL_BODY_BYTES, NUM_TEMPLATES = 100_000, 4
MAX_GROWTH = 6
SLACK_SECONDS = 0.01
"""Allowed in addition, because short times vary."""

MAX_SECONDS = 0.1
TRIES = 20
MAX_ERROR_BYTES = 2_000

SHAPES: dict[str, Callable[[int], str]] = {
    "numbers": lambda n: f"[{'1,' * (n // 2)}1]",
    "floats": lambda n: f"[{'1e9,' * (n // 4)}1e9]",
    "strings": lambda n: '["",' + '"",' * (n // 3) + '""]',
    "strings and a number": lambda n: "[" + '"a",' * (n // 4) + "1]",
    "empty lists": lambda n: f"[{'[],' * (n // 3)}[]]",
    "empty objects": lambda n: "[" + "{}," * (n // 3) + "{}]",
    "objects": lambda n: "[" + '{"type":"function","role":"user","content":[1]},' * (n // 48) + "{}]",
    "names": lambda n: "{" + names(n) + "}",
    "a name twice": lambda n: "{" + names(n) + ',"0":2}',
    "lists in a string": lambda n: f'"[{"[]," * (n // 3)}[]]"',
    "a string": lambda n: f'"{"a" * n}"',
    "line breaks": lambda n: '"' + r"\n" * (n // 2) + '"',
    "surrogates": lambda n: '"' + r"\ud83d" * (n // 6) + '"',
    "quotes": lambda n: '"' * n,
    "an integer": lambda n: "9" * n,
    "depth": lambda n: "[" * n,
}


def names(num_bytes: int) -> str:
    return ",".join(f'"{number}":1' for number in range(num_bytes // 9))


PLACE = "the place"
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
MESSAGES = [{"role": "user", "content": [{"type": "text", "text": "a"}]}, {"role": "assistant", "tool_calls": [CALL]}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"enum": [1]}}}]
INPUT = [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}]
SAMPLES: dict[str, Any] = {
    "/v1/completions": {"model": "default", "prompt": "a"},
    "/v1/chat/completions": {"model": "default", "messages": MESSAGES, "tools": TOOLS},
    "/v1/responses": {
        "model": "default",
        "input": [*INPUT, {"type": "additional_tools", "tools": [{"type": "x"}]}],
        "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
        "text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}}},
    },
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [1]},
}


def with_place(value: Any) -> Iterator[Any]:
    """Yield copies of a JSON value, each with another part replaced by `PLACE`."""
    yield PLACE
    if isinstance(value, dict):
        yield from (value | {name: inner} for name, item in value.items() for inner in with_place(item))
    elif isinstance(value, list):
        yield from ([*value[:i], inner, *value[i + 1 :]] for i, item in enumerate(value) for inner in with_place(item))


def templates(path: str) -> list[str]:
    """Return bodies for a path, each with `PLACE` in a field or within one."""
    sample = SAMPLES[path]
    fields = [sample | {name: PLACE} for name in (*BODIES[path].model_fields, "an unknown one") if name not in sample]
    return [json.dumps(made) for made in (*with_place(sample), *fields)]


class Reader:
    """The app up to validation, on an event loop of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._app = validating_app()

    def check_answer(self, path: str, body: bytes) -> None:
        status, error = self.loop.run_until_complete(answer(self._app, path, body))
        assert status in (200, 400, 413), status
        assert len(error) < MAX_ERROR_BYTES, error

    def seconds(self, path: str, body: bytes) -> float:
        started = time.thread_time()
        self.check_answer(path, body)
        return time.thread_time() - started


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> Iterator[Reader]:
    monkeypatch.setattr(server.http.bodies, "WAIT_RATIO", 0)
    gc.collect()
    gc.freeze()  # as the server does
    made = Reader()
    yield made
    made.loop.close()
    gc.unfreeze()


def check_growth(seconds: Callable[[int], float], most: int, what: object, limit: float = MAX_SECONDS) -> None:
    """Check the time for `most` bytes, and that it is at most in proportion to the time for a quarter of them."""
    part = whole = math.inf
    for _ in range(TRIES):
        part, whole = min(part, seconds(most // 4)), min(whole, seconds(most))
        if whole < min(limit, MAX_GROWTH * part + SLACK_SECONDS):
            return
    raise AssertionError(f"{what}: {part:.3f} s for a quarter, {whole:.3f} s for {most:,} bytes")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("size", [SMALL_BODY_BYTES, pytest.param(MAX_BODY_BYTES, marks=pytest.mark.slow)])
def test_the_time_to_read_a_body_is_proportional_to_its_size(reader, path, shape, size):
    made = {length: SHAPES[shape](length) for length in (size // 4, size)}
    all_templates = templates(path)
    few = random.Random(shape).sample(all_templates, min(NUM_TEMPLATES, len(all_templates)))
    for template in few if size == SMALL_BODY_BYTES else all_templates:
        before, _, after = template.partition(f'"{PLACE}"')
        bodies = {length: f"{before}{text}{after}".encode() for length, text in made.items()}
        check_growth(lambda length, bodies=bodies: reader.seconds(path, bodies[length]), size, (path, template, shape))


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


@pytest.mark.parametrize("path", BODIES)
def test_an_odd_value_in_any_place_of_a_body_is_accepted_or_refused(reader, path):
    chance = random.Random(path)
    for template in templates(path):
        for value in chance.sample(ODD_VALUES, 6):
            reader.check_answer(path, template.replace(f'"{PLACE}"', json.dumps(value)).encode())


def nodes(schema: Any) -> Iterator[dict[str, Any]]:
    if isinstance(schema, dict):
        yield schema
    for inner in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list | tuple) else ():
        yield from nodes(inner)


@pytest.mark.parametrize("path", BODIES)
def test_every_list_is_counted_before_its_items_are_validated_until_the_first_error(path):
    found = [node for node in nodes(BODIES[path].__pydantic_core_schema__) if node.get("type") in ("list", "dict")]
    assert found
    for node in found:
        is_list = node["type"] == "list"
        is_validated = is_list or node.get("values_schema", {"type": "any"})["type"] != "any"
        assert not is_validated or node.get("max_length"), node
        assert not is_list or node.get("fail_fast"), node


@pytest.mark.parametrize("pause", ["", "\n", "\r\nx:"])
def test_the_time_to_read_a_head_that_arrives_byte_by_byte_is_proportional_to_its_size(pause):
    def seconds(length: int) -> float:
        parser = Parser(h11.SERVER, MAX_HEAD_BYTES)
        head = f"GET / HTTP/1.1\r\nhost: a\r\nx:{'y' * length}{pause}".encode()
        started = time.thread_time()
        with suppress(h11.RemoteProtocolError):  # a line feed without a carriage return
            for byte in head:
                parser.receive_data(bytes([byte]))
                parser.next_event()
        return time.thread_time() - started

    check_growth(seconds, 16_000, pause, limit=math.inf)


def many(number: int, item: Callable[[int], Any]) -> list[Any]:
    return [item(place) for place in range(number)]


def added(place: int) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    return {"id": place + 1, "content": f"<{place}>", **flags}


def byte_pairs(number: int) -> dict[str, Any]:
    return {"type": "BPE", "vocab": {f"t{place}": place for place in range(number)}, "merges": []}


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
UNIGRAM = {"type": "Unigram", "unk_id": 0}
TOKENIZERS: dict[str, Callable[[int], dict[str, Any]]] = {
    "vocabulary": lambda n: {"model": byte_pairs(n // 12)},
    "scored pieces": lambda n: {"model": UNIGRAM | {"vocab": many(n // 16, lambda i: [f"t{i}", -1])}},
    "added tokens": lambda n: {"added_tokens": many(n // 110, added)},
    "normalizers": lambda n: {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}] * (n // 15)}},
    "splits": lambda n: {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Whitespace"}] * (n // 22)}},
    "decoders": lambda n: {"decoder": {"type": "Sequence", "decoders": [{"type": "Fuse"}] * (n // 16)}},
}


@pytest.mark.parametrize("shape", TOKENIZERS)
def test_the_time_to_try_a_tokenizer_is_proportional_to_its_size(shape):
    """What grows faster, such as normalizers that lengthen a text, ends with the limits of the trial's process."""

    def seconds(length: int) -> float:
        plain = {"version": "1.0", "model": byte_pairs(1), "pre_tokenizer": BYTES, "decoder": BYTES}
        serialized = json.dumps({**plain, **TOKENIZERS[shape](length)})
        started = time.thread_time()
        assert not error_of(serialized, *TEXTS)
        return time.thread_time() - started

    check_growth(seconds, 200_000, shape)
