"""What an operator may set, on the command line or as NVIUM_… in the environment, which is read nowhere else."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from nvium_core import Device, NviumError, Precision, Schedule

Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]

LATENCY_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class SettingsError(NviumError, ValueError):
    """A setting that is not one; the message names it."""


class Settings(BaseSettings):
    """`model` is a folder or Hub name, None the embedded one. A request's choices are its prompts times its `n`."""

    model_config = SettingsConfigDict(env_prefix="NVIUM_", frozen=True, extra="forbid")

    model: str | None = None
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

    request_seconds: Seconds | None = None
    slow_client_seconds: Seconds = 60
    arrival_seconds: Seconds = 60
    drain_seconds: Seconds = 30
    keep_alive_seconds: Seconds = 15
    stall_seconds: Seconds = 30
    latency_buckets: tuple[float, ...] = LATENCY_BUCKETS


def read_settings(given: Mapping[str, Any]) -> Settings:
    """Settings from what was given, then the environment, then the defaults. Raises `SettingsError`."""
    try:
        return Settings(**given)
    except ValidationError as error:
        first = error.errors()[0]
        raise SettingsError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}, got {first['input']!r}") from error
