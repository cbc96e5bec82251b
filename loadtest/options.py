"""Options of `python -m loadtest`, and their validation."""

import argparse
import math
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn, TypeVar

import httpx

from loadtest.sweep import workloads
from loadtest.workload import DEFAULT_PROMPTS, Workload, WorkloadError, read_prompts

Number = TypeVar("Number", int, float)

LEAST = 0.001  # the least time and the least rate


class OneLineParser(argparse.ArgumentParser):
    """A parser that prints errors as one line, without usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"loadtest: {message}\n")


def parser() -> OneLineParser:
    options = OneLineParser(
        prog="loadtest", allow_abbrev=False, description="Measure a running OpenAI-compatible server over HTTP."
    )
    add = options.add_argument
    add("--base-url", type=base_url, default="http://127.0.0.1:8000", metavar="URL", help="the server, without /v1")
    add("--model", default="default", help="model name in the requests (default)")
    add("--api-key", type=api_key, metavar="KEY", help="sent as a bearer token")
    add(
        "--timeout",
        type=at_least(LEAST),
        default=300.0,
        metavar="SECONDS",
        help="time without data after which a request fails (300)",
    )

    add = options.add_argument_group("load").add_mutually_exclusive_group().add_argument
    add("--concurrency", type=several(at_least(1)), metavar="N,N…", help="closed loop: concurrent users (4)")
    rates = several(at_least(LEAST))
    add("--rate", type=rates, metavar="R,R…", help="open loop: requests per second, Poisson")
    add = options.add_argument_group("requests").add_argument
    add("--requests", type=at_least(1), default=32, metavar="N", help="requests per load (32)")
    add("--warm-up", type=at_least(0), default=4, metavar="N", help="warm-up requests before each load (4)")
    add("--max-tokens", type=at_least(1), default=64, metavar="N", help="tokens per answer (64)")
    add("--ignore-eos", action="store_true", help="generate up to --max-tokens (an nvium and vLLM extension)")
    add("--temperature", type=at_least(0.0), default=1.0, metavar="T")
    add("--seed", type=at_least(0), default=0, metavar="N", help="for arrivals; request i samples with N + i (0)")
    add("--prompts", type=Path, metavar="FILE", help="one prompt per line")

    add = options.add_argument_group("results").add_argument
    add("--json", type=Path, metavar="FILE", help="write the results to this file")
    return options


def sweep(arguments: argparse.Namespace) -> list[Workload]:
    """Return a workload for each concurrency or rate. Raise `WorkloadError` if an option or the prompts are invalid."""
    base = Workload(
        prompts=read_prompts(arguments.prompts) if arguments.prompts else DEFAULT_PROMPTS,
        num_requests=arguments.requests,
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        seed=arguments.seed,
        ignore_eos=arguments.ignore_eos,
    )
    if arguments.rate:
        return workloads(base, [{"rate": rate} for rate in arguments.rate], arguments.warm_up)
    numbers = arguments.concurrency or [min(4, arguments.requests)]
    if max(numbers) > arguments.requests:
        raise WorkloadError(f"--concurrency {max(numbers)} requires at least as many --requests")
    return workloads(base, [{"concurrency": number} for number in numbers], arguments.warm_up)


def base_url(text: str) -> httpx.URL:
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if url.scheme not in ("http", "https") or not url.host:
        raise argparse.ArgumentTypeError(f"must be an http or https URL, got {text}")
    if url.path.rstrip("/").endswith("/v1"):
        raise argparse.ArgumentTypeError("must not end with /v1")
    return url


def api_key(text: str) -> str:
    if not (text.isascii() and text.isprintable() and text.strip()):
        raise argparse.ArgumentTypeError("must be printable ASCII")
    return text


def at_least(least: Number) -> Callable[[str], Number]:
    """Return an argparse type for finite numbers from `least`, which are whole if `least` is."""
    kind: type[Number] = type(least)
    what = {int: "a whole number", float: "a number"}[kind]

    def read(text: str) -> Number:
        with suppress(ValueError):
            if least <= (number := kind(text)) < math.inf:
                return number
        raise argparse.ArgumentTypeError(f"must be {what}, at least {least}, got {text}")

    return read


def several(number: Callable[[str], Number]) -> Callable[[str], list[Number]]:
    """Return an argparse type for distinct numbers separated by commas. `number` converts each of them."""

    def read(text: str) -> list[Number]:
        found = [number(each) for each in text.split(",")]
        if len(set(found)) < len(found):
            raise argparse.ArgumentTypeError(f"must be distinct numbers, got {text}")
        return found

    return read
