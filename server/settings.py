"""What an operator may set, on the command line or as NVIUM_… in the environment, which is read nowhere else."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from nvium_core import Device, NviumError, Precision, Schedule

ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/\s]+")
ENDPOINT = re.compile(r"https?://[^/\s]+(/\S*)?")


def comma_separated(value: object) -> object:
    """Text from the environment or the command line as a list; anything else stays what it is."""
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else value


def as_sent(text: str) -> str:
    """An origin, as browsers write it."""
    origin = text.lower()
    if not ORIGIN.fullmatch(origin):
        raise ValueError("must be an origin such as https://example.org, without a path, or *")
    return origin


def endpoint(url: str) -> str:
    if not ENDPOINT.fullmatch(url):
        raise ValueError("must be a URL such as http://localhost:4318")
    return url


Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
List = (NoDecode, BeforeValidator(comma_separated))
Names = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], *List]
Origins = Annotated[tuple[Annotated[str, AfterValidator(as_sent)], ...], *List]
Secrets = Annotated[tuple[SecretStr, ...], *List]
Numbers = Annotated[tuple[float, ...], *List]

SECRET = ("api_keys", "otlp_endpoint")
"""Settings whose values are never shown."""

LATENCY_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


PRESUMED_OF_RAY = {"RAY_DEDUP_LOGS": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
"""Every line of every replica is shown, nothing is told to Ray's makers, and replicas yield to nobody."""


class SettingsError(NviumError, ValueError):
    """A setting that is not one; the message names it."""


class Settings(BaseSettings):
    """`model` is a folder or Hub name, None the embedded one. A request's choices are its prompts times its `n`."""

    model_config = SettingsConfigDict(env_prefix="NVIUM_", frozen=True, extra="forbid", hide_input_in_errors=True)

    model: str | None = None
    model_aliases: Annotated[Names, Field(description="other names under which the model answers")] = ()
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    device: Device = "auto"
    dtype: Precision = "auto"
    schedule: Schedule = "optimal"
    deterministic: bool = False

    max_sequences: Positive = 32
    max_rows_per_step: Positive = 256
    chunk_rows: Positive = 64
    max_wait_steps: Positive = 64
    cache_memory: str | None = None
    cache_tokens: Positive | None = None
    prefix_caching: bool = True
    context: Positive | None = None

    max_queue: Annotated[int, Field(ge=0, description="choices that may wait beyond those that can run")] = 1024
    max_prompts: Positive = 1024
    max_n: Positive = 128
    max_new_tokens: Annotated[int, Field(ge=1, description="choices × max_tokens of one request")] = 262_144
    max_body_bytes: Positive = 2_000_000
    max_present_bytes: Annotated[int, Field(ge=1, description="bodies of all requests not yet answered")] = 64_000_000
    max_connections: Positive = 4096

    api_keys: Annotated[Secrets, Field(description="KEY or NAME:KEY; without any the server is open")] = ()
    api_keys_file: Annotated[Path | None, Field(description="the same, one a line, with # comments")] = None
    metrics_open: Annotated[bool, Field(description="/metrics asks for no key")] = False
    requests_per_minute: Annotated[
        Positive | None, Field(description="of each key, or of everybody where there are none; None: any number")
    ] = None
    playground: Annotated[bool, Field(description="a page at / to try the model on")] = True
    ssl_certfile: Annotated[Path | None, Field(description="certificate chain in PEM; then there is TLS only")] = None
    ssl_keyfile: Annotated[Path | None, Field(description="its key, if not in the same file")] = None
    cors_origins: Annotated[Origins, Field(description="whose pages may call this server from a browser")] = ()
    otlp_endpoint: Annotated[
        Annotated[str, AfterValidator(endpoint)] | None,
        Field(
            description="base URL of an OpenTelemetry collector (OTLP over HTTP) that gets a trace of each request",
            repr=False,
        ),
    ] = None

    replicas: Annotated[
        Positive | None, Field(description="processes with a model each, by Ray; None: one, without")
    ] = None
    max_replicas: Annotated[Positive | None, Field(description="as many, if there is enough to do; None: no more")] = (
        None
    )
    sequences_per_replica: Annotated[Positive, Field(description="running and waiting, that make enough to do")] = 16
    prefix_affinity: Annotated[bool, Field(description="prompts go where their beginning has been seen")] = True
    upscale_seconds: Annotated[Seconds, Field(description="how long there must be more to do")] = 10
    downscale_seconds: Annotated[Seconds, Field(description="how long there must be less to do")] = 300

    request_seconds: Annotated[Seconds | None, Field(description="how long a request may take; None: any time")] = None
    slow_client_seconds: Annotated[Seconds, Field(description="how long a client may take nothing of its answer")] = 60
    arrival_seconds: Annotated[Seconds, Field(description="how long a request may take to arrive")] = 60
    drain_seconds: Seconds = 30
    keep_alive_seconds: Seconds = 15
    stall_seconds: Seconds = 30
    latency_buckets: Numbers = LATENCY_BUCKETS


def presume(variables: Mapping[str, str]) -> None:
    """Set what the environment does not say, for libraries that read it when they are imported."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def read_settings(given: Mapping[str, Any]) -> Settings:
    """Settings from what was given, then the environment, then the defaults. Raises `SettingsError`."""
    try:
        return Settings(**given)
    except ValidationError as error:
        first = error.errors()[0]
        name, complaint = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")
        value = f", got {first['input']!r}" if may_be_told(first["loc"][0]) else ""
        raise SettingsError(f"{name}: {complaint}{value}") from error


def may_be_told(name: int | str) -> bool:
    """Whether an error may repeat a setting's value: not what may hold a secret, nor what may be one misnamed."""
    return name in Settings.model_fields and name not in SECRET
