"""The validated options of `nvium serve`: from the command line, else `NVIUM_…` variables, else the defaults.

`nvium_core/options.py` declares the options. This module adds the checks that types and bounds cannot express.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Annotated, Any, get_origin

from pydantic import AfterValidator, Field, ValidationError, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from nvium_core import EngineConfig, InvalidRequest, NviumError, ServerOptions
from nvium_core.errors import rephrase

ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/\s]+")
PREFIX = re.compile(r"(/[A-Za-z0-9._~-]+)+")

VARIABLES = "NVIUM_"
VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"


class SettingsError(NviumError, ValueError):
    """A setting is invalid. The message names the setting."""


def as_origin(text: str) -> str:
    """Return the origin in lower case, as browsers send it."""
    origin = text.lower()
    if not ORIGIN.fullmatch(origin):
        raise ValueError("must be an origin such as https://example.org, without a path, or *")
    return origin


def as_prefix(path: str) -> str:
    prefix = path.rstrip("/")
    if prefix and not PREFIX.fullmatch(prefix):
        raise ValueError("must be a path such as /llm, of letters, digits, . _ ~ - and /")
    return prefix


def as_buckets(bounds: tuple[float, ...]) -> tuple[float, ...]:
    if not all(low < high < inf for low, high in pairwise((0.0, *bounds))):
        raise ValueError("must be increasing positive numbers, such as 0.1,0.5,1")
    return bounds


class Settings(BaseSettings, ServerOptions):  # type: ignore[misc] # frozen below, which mypy cannot see
    model_config = SettingsConfigDict(
        env_prefix=VARIABLES, frozen=True, extra="forbid", hide_input_in_errors=True, enable_decoding=False
    )

    api_keys: Annotated[tuple[str, ...], Field(repr=False, exclude=True)] = ServerOptions.api_keys
    root_path: Annotated[str, AfterValidator(as_prefix)] = ServerOptions.root_path
    cors_origins: tuple[Annotated[str, AfterValidator(as_origin)], ...] = ServerOptions.cors_origins
    latency_buckets: Annotated[tuple[float, ...], AfterValidator(as_buckets)] = ServerOptions.latency_buckets

    @field_validator("*", mode="before")
    @classmethod
    def _split_lists(cls, value: object, info: ValidationInfo) -> object:
        is_list = get_origin(cls.model_fields[str(info.field_name)].annotation) is tuple
        return [part.strip() for part in value.split(",")] if is_list and isinstance(value, str) else value

    @property
    def engine(self) -> EngineConfig:
        """Raise `InvalidRequest` if the engine's settings contradict each other."""
        return EngineConfig(**{field.name: getattr(self, field.name) for field in fields(EngineConfig)})


VARIABLE_OF = {name: f"{VARIABLES}{name}".upper() for name in Settings.model_fields}
"""Setting → its environment variable."""


def read_file(name: str, file: Path) -> str:
    """Read a text file that the setting `name` refers to. Raise `SettingsError` if it cannot be read."""
    try:
        return file.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise SettingsError(f"{name}: cannot read {file}: {error.strerror}") from error
    except UnicodeDecodeError:
        raise SettingsError(f"{name}: {file} is not UTF-8 text") from None


def environment(*, gpu: int | None) -> dict[str, str]:
    """Return this process's environment, limited to the GPU with this index among the visible GPUs."""
    visible = os.environ.get(VISIBLE_GPUS)
    limit = {} if gpu is None else {VISIBLE_GPUS: visible.split(",")[gpu] if visible else str(gpu)}
    return {**os.environ, **limit}


def read_settings(given: Mapping[str, Any]) -> Settings:
    """Read settings from `given`, then the environment, then the defaults. Raise `SettingsError` if one is invalid."""
    if unknown := min(own_variables().difference(VARIABLE_OF.values()), default=""):
        close = get_close_matches(unknown.removeprefix(VARIABLES).lower(), VARIABLE_OF, n=1)
        hint = (
            f"did you mean {VARIABLE_OF[close[0]]}?" if close else "unset it, or set an option of `nvium serve --help`"
        )
        raise SettingsError(f"{unknown}: is unknown; {hint}")
    try:
        settings = Settings(**given)
        _ = settings.engine
    except ValidationError as error:
        first = error.errors()[0]
        setting, *place = first["loc"]
        entry = "".join(f", entry {index + 1}" for index in place if isinstance(index, int))
        # an unknown setting may be a misspelt secret, so its value is not quoted either
        is_quotable = setting in Settings.model_fields and setting != "api_keys"
        value = f", got {first['input']!r}" if is_quotable else ""
        raise SettingsError(f"{name_of(setting, given)}{entry}: {rephrase(rephrase(first['msg']) + value)}") from error
    except InvalidRequest as error:
        raise SettingsError(f"{name_of(error.field, given)}: {error.message}") from error
    return settings


def own_variables() -> set[str]:
    """Return the environment's variables that begin with `NVIUM_`, in capitals, because their case does not matter."""
    return {name.upper() for name in os.environ if name.upper().startswith(VARIABLES)}


def name_of(setting: Any, given: Mapping[str, Any]) -> str:
    variable = VARIABLE_OF.get(setting, "")
    return variable if setting not in given and variable in own_variables() else str(setting)
