"""`python -m tests.fuzzing.forms [--seconds 1800] [--seed 0] [--json FILE]`: hostile grammars against a whole server.

Two clients send costly or damaged schemas, Lark and GBNF grammars and regexes to a server in its own process. A third
client streams, and a fourth one calls /livez. The server must not delay them by a second, respond with a 5xx, or end.
Bodies that break this are written to --folder.
"""

import argparse
import json
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from nvium_core.bench.figures import write_json
from nvium_core.loading import bundled_model
from tests.server.fuzz import with_something_odd
from tests.server.grammar_samples import COSTLY_PATTERNS, COSTLY_SCHEMAS, REFUSED_SCHEMAS, chained
from tests.server.server_process import server_process

Json = dict[str, Any]

SLOW_SECONDS = 1.0
KEYWORDS = ("properties", "patternProperties", "items", "prefixItems", "anyOf", "oneOf", "allOf", "not", "if")
KEYWORDS += ("additionalProperties", "propertyNames", "dependentSchemas", "unevaluatedProperties", "contains")


def schema_of(chance: random.Random, depth: int) -> Json:
    """Return a schema of chained references or nested keywords, of up to `depth` levels."""
    key = chance.choice(KEYWORDS)
    wrap: Callable[[Any], Any] = {
        "properties": lambda child: {chance.choice("ab"): child, "c": {}},
        "patternProperties": lambda child: {chance.choice(["^a", "(a|b){9}.*", "(?=x)"]): child},
        "dependentSchemas": lambda child: {"a": child},
    }.get(key, lambda child: [child, {"type": "null"}] if key in ("anyOf", "oneOf", "allOf", "prefixItems") else child)
    if chance.random() < 0.6:
        return chained(depth, lambda _, rest: {key: wrap(rest)}, {"type": chance.choice(["string", "integer"])})
    schema: Json = {"type": "string", "pattern": regex_of(chance, 5), "maxLength": 10 ** chance.randrange(21)}
    for _ in range(min(depth, 60)):
        schema = {key: wrap(schema)}
    return schema | {"minItems": 10 ** chance.randrange(12), "maximum": 10.0 ** chance.randrange(30)}


def regex_of(chance: random.Random, depth: int) -> str:
    text = chance.choice(["a", ".", r"\w", "[^a]", "(a|aa)", "(?=a)", r"\p{L}", "é"])
    for _ in range(chance.randrange(depth)):
        tail = chance.choice(["*", "+", "?", "{0,500}", "{1,1000}", "{20}", "|b", "b.*", ".*c"])
        text = f"({text}){tail}"
    return text


def lark_of(chance: random.Random, size: int, *, is_gbnf: bool = False) -> str:
    """Return an ambiguous grammar whose rules refer to the next rule or to random rules."""
    first, defines = ("root", " ::= ") if is_gbnf else ("start", ": ")
    letters = '"a"' if is_gbnf else chance.choice(['"a"', "/[a-z ]/"])
    is_chain = chance.random() < 0.5
    prefix = chance.choice(["r", "R"]) if not is_gbnf else "r"
    lines = [f"{first}{defines}{prefix}0{chance.choice(['', '*', '+'])}"]
    for number in range(size):
        others = [f"{prefix}{number + 1}"] if is_chain else [f"{prefix}{chance.randrange(size)}" for _ in range(3)]
        sides = [" ".join(chance.choices([letters, *others], k=chance.randrange(1, 4))) for _ in others]
        lines.append(f"{prefix}{number}{defines}{' | '.join([*sides, letters])}")
    return "\n".join([*lines, f"{prefix}{size}{defines}{letters}"])


def form(chance: random.Random) -> Json:
    """Return random fields of a request that constrain its output."""
    size = chance.choice([3, 10, 30, 100, 500, 2_000])
    filler = chance.choice(["\n", " \n", "//\n", "start", "#", "x ::= "])
    known = chance.choice([*COSTLY_SCHEMAS.values(), *REFUSED_SCHEMAS.values()])
    makers: list[Callable[[], Json]] = [
        lambda: {"structured_outputs": {"regex": chance.choice([*COSTLY_PATTERNS, regex_of(chance, 9)])}},
        lambda: {"structured_outputs": {"choice": [str(i) * chance.randrange(1, 9) for i in range(size)]}},
        lambda: {"structured_outputs": {"json": with_something_odd(known, chance)}},
        lambda: {"structured_outputs": {"json": schema_of(chance, size)}},
        lambda: {"structured_outputs": {"grammar": lark_of(chance, size)}},
        lambda: {"structured_outputs": {"grammar": lark_of(chance, size, is_gbnf=True)}},
        lambda: {"structured_outputs": {"grammar": filler * 15_000}},
    ]
    return chance.choice(makers)()


def rules(number: int, letter: str = "r", defines: str = ":", first: str = "start") -> str:
    chain = [f'{letter}{i}{defines} "a" {letter}{i + 1}' for i in range(number)]
    return "\n".join([f"{first}{defines} {letter}0", *chain, f'{letter}{number}{defines} "b"'])


ALTERNATIVES = " | ".join(f"r{j} r{k}" for j in range(0, 30, 3) for k in range(0, 30, 3)) + " | /[a-z ]/"
KNOWN: list[Json] = [
    {"structured_outputs": {"json": chained(1_100, lambda _, rest: {"properties": {"a": rest}}, {"type": "null"})}},
    {"structured_outputs": {"json": chained(900, lambda i, rest: {"allOf": [rest, {"minItems": i}]}, {})}},
    {"structured_outputs": {"regex": "(.{0,500}){20}"}, "logit_bias": {"0": -100}},
    {"structured_outputs": {"grammar": rules(6_000)}},
    {"structured_outputs": {"grammar": rules(6_000, "R")}},
    {"structured_outputs": {"grammar": rules(2_000, defines=" ::=", first="root")}},
    {"structured_outputs": {"grammar": "\n" * 99_000}},
    {"structured_outputs": {"grammar": 'start: x\nx: x x x | x x | /[a-z ]/ | ""'}},
    {"structured_outputs": {"grammar": "\n".join(["start: r0", *(f"r{i}: {ALTERNATIVES}" for i in range(30))])}},
]
"""Fields that once crashed or stalled a server or its grammar processes."""


@dataclass
class Watch:
    """Clients that measure their waits while others attack."""

    url: str
    worst: Counter[str] = field(default_factory=Counter)
    """Longest wait in milliseconds, by client."""
    is_over: bool = False

    def look(self) -> None:
        with httpx.Client(base_url=self.url, timeout=60) as http:
            while not self.is_over:
                self._note("livez", lambda: http.get("/livez").raise_for_status())
                time.sleep(0.05)

    def neighbour(self) -> None:
        body = {"model": "default", "prompt": "Once", "max_tokens": 100, "stream": True}
        with httpx.Client(base_url=self.url, timeout=60) as http:
            while not self.is_over:
                with http.stream("POST", "/v1/completions", json=body) as answer:
                    next_line = partial(next, answer.iter_lines(), None)
                    while self._note("neighbour", next_line) is not None:
                        pass

    @property
    def num_slow(self) -> int:
        return sum(milliseconds > SLOW_SECONDS * 1000 for milliseconds in self.worst.values())

    def _note(self, name: str, call: Callable[[], Any]) -> Any:
        started = time.monotonic()
        result = call()
        self.worst[name] = max(self.worst[name], round((time.monotonic() - started) * 1000))
        return result


def attack(url: str, bodies: Iterator[Json], until: float, seen: Counter[str], folder: Path, watch: Watch) -> None:
    with httpx.Client(base_url=url, timeout=120) as http:
        for body in bodies:
            if time.monotonic() > until:
                return
            before = watch.num_slow
            asked = {"model": "default", "prompt": "Once", "max_tokens": 40, "n": 2, "seed": 1, **body}
            try:
                status = str(http.post("/v1/completions", content=json.dumps(asked)).status_code)
            except RecursionError:
                continue
            except httpx.HTTPError as error:
                status = type(error).__name__
            seen[status] += 1
            if watch.num_slow > before or status not in ("200", "400", "413"):
                seen["findings"] += 1
                folder.mkdir(parents=True, exist_ok=True)
                (folder / f"{seen.total()}.json").write_text(json.dumps(body))


def campaign(url: str, seconds: float, seed: int, folder: Path) -> Json:
    watch, seen, until = Watch(url), Counter[str](), time.monotonic() + seconds
    watchers = [threading.Thread(target=each) for each in (watch.look, watch.neighbour)]
    bodies = [map(form, repeat(random.Random(f"{seed} {number}"))) for number in range(2)]
    attackers = [threading.Thread(target=attack, args=(url, each, until, seen, folder, watch)) for each in bodies]
    for thread in [*watchers, *attackers]:
        thread.start()
    for thread in attackers:
        thread.join()
    watch.is_over = True
    for thread in watchers:
        thread.join()
    return {"statuses": dict(seen), "worst_milliseconds": dict(watch.worst)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1800)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path(".fuzzing/forms"))
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with TemporaryDirectory() as folder, server_process(bundled_model(), Path(folder)) as server:
        result = campaign(server.url, given.seconds, given.seed, given.folder)
    sys.stdout.write(json.dumps(result, indent=1) + "\n")
    if given.json:
        write_json(result, given.json)
    sys.exit("findings" in result["statuses"])


if __name__ == "__main__":
    main()
