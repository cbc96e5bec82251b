"""The checked options of `nvium serve`: from the command line, else NVIUM_… in the environment, else the defaults.

They are declared in `nvium_core/options.py`; here are the checks that types and bounds do not cover.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, get_origin

from pydantic import AfterValidator, Field, ValidationError, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from nvium_core import EngineConfig, InvalidRequest, NviumError, ServerOptions
from nvium_core.errors import plain

ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/\s]+")
PREFIX = re.compile(r"(/[A-Za-z0-9._~-]+)+")
ENDPOINT = re.compile(r"https?://[^/\s]+(/\S*)?")

SECRET = ("api_keys", "otlp_endpoint")
"""Settings whose values are never shown."""

RAY_DEFAULTS = {"RAY_DEDUP_LOGS": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
"""Show every line of every replica, send no usage reports, run replicas at normal priority."""


class SettingsError(NviumError, ValueError):
    """An invalid setting; the message names it."""


def as_sent(text: str) -> str:
    """An origin in the form that browsers send."""
    origin = text.lower()
    if not ORIGIN.fullmatch(origin):
        raise ValueError("must be an origin such as https://example.org, without a path, or *")
    return origin


def as_prefix(path: str) -> str:
    """A path prefix."""
    prefix = path.rstrip("/")
    if prefix and not PREFIX.fullmatch(prefix):
        raise ValueError("must be a path such as /llm, of letters, digits, . _ ~ - and /")
    return prefix


def endpoint(url: str) -> str:
    if not ENDPOINT.fullmatch(url):
        raise ValueError("must be a URL such as http://localhost:4318")
    return url


class Settings(BaseSettings, ServerOptions):  # type: ignore[misc] # frozen below, which mypy cannot see
    model_config = SettingsConfigDict(
        env_prefix="NVIUM_", frozen=True, extra="forbid", hide_input_in_errors=True, enable_decoding=False
    )

    api_keys: Annotated[tuple[str, ...], Field(repr=False, exclude=True)] = ServerOptions.api_keys
    root_path: Annotated[str, AfterValidator(as_prefix)] = ServerOptions.root_path
    cors_origins: tuple[Annotated[str, AfterValidator(as_sent)], ...] = ServerOptions.cors_origins
    otlp_endpoint: Annotated[Annotated[str, AfterValidator(endpoint)] | None, Field(repr=False, exclude=True)] = (
        ServerOptions.otlp_endpoint
    )

    @field_validator("*", mode="before")
    @classmethod
    def _split_lists(cls, value: object, info: ValidationInfo) -> object:
        """Split comma-separated text from the environment or the command line."""
        is_list = get_origin(cls.model_fields[str(info.field_name)].annotation) is tuple
        return [part.strip() for part in value.split(",")] if is_list and isinstance(value, str) else value

    @property
    def engine(self) -> EngineConfig:
        """Raises `InvalidRequest`."""
        return EngineConfig(**{field.name: getattr(self, field.name) for field in fields(EngineConfig)})


def set_defaults(variables: Mapping[str, str]) -> None:
    """Set unset environment variables, for libraries that read them on import."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def read_settings(given: Mapping[str, Any]) -> Settings:
    """Settings from `given`, then the environment, then the defaults. Raises `SettingsError`."""
    try:
        settings = Settings(**given)
        _ = settings.engine
    except ValidationError as error:
        first = error.errors()[0]
        name, message = ".".join(map(str, first["loc"])), plain(first["msg"])
        value = f", got {first['input']!r}" if may_be_quoted(first["loc"][0]) else ""
        raise SettingsError(f"{name}: {message}{value}") from error
    except InvalidRequest as error:
        raise SettingsError(str(error)) from error
    return settings


def may_be_quoted(name: int | str) -> bool:
    """Whether an error may quote a setting's value: not of a secret, nor of an unknown setting, which may be one."""
    return name in Settings.model_fields and name not in SECRET
