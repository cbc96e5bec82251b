"""Serving a model, and letting it speak in the terminal."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nvium_core.choices import Device, Precision, Schedule
from nvium_core.commands.options import DeviceOption, ModelArgument, PrecisionOption

if TYPE_CHECKING:
    from server.settings import Settings


def serve(
    model: ModelArgument = None,
    model_aliases: Annotated[str | None, typer.Option(help="Its other names, comma separated.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on [127.0.0.1].")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on [8000].")] = None,
    device: Annotated[Device | None, typer.Option(help="auto is CUDA where there is one.")] = None,
    dtype: Annotated[Precision | None, typer.Option(help="auto is float32 on CPU, bfloat16 on CUDA.")] = None,
    schedule: Annotated[Schedule | None, typer.Option(help="Which block next [optimal].")] = None,
    deterministic: Annotated[bool | None, typer.Option("--deterministic", help="Same bits whatever else runs.")] = None,
    context: Annotated[int | None, typer.Option(help="Tokens of prompt and answer together [the model's].")] = None,
    max_sequences: Annotated[int | None, typer.Option(help="Sequences that run at once [32].")] = None,
    max_rows_per_step: Annotated[int | None, typer.Option(help="Rows of one step; cuts long prompts [256].")] = None,
    chunk_rows: Annotated[int | None, typer.Option(help="Rows of them for prompts while others speak [64].")] = None,
    max_wait_steps: Annotated[int | None, typer.Option(help="Steps a sequence may be passed over [64].")] = None,
    cache_memory: Annotated[
        str | None, typer.Option(help="For the key/value cache, such as 2GiB or 10% [what is needed, at most 25%].")
    ] = None,
    cache_tokens: Annotated[int | None, typer.Option(help="Or the positions it holds.")] = None,
    prefix_caching: Annotated[bool | None, typer.Option(help="Keep prompts' pages to be found again [on].")] = None,
    max_queue: Annotated[int | None, typer.Option(help="Choices that may wait [1024].")] = None,
    max_prompts: Annotated[int | None, typer.Option(help="Prompts of one request [1024].")] = None,
    max_n: Annotated[int | None, typer.Option(help="Choices per prompt [128].")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="Choices × max_tokens of one request.")] = None,
    max_body_bytes: Annotated[int | None, typer.Option(help="Size of a request's body [2,000,000].")] = None,
    max_present_bytes: Annotated[int | None, typer.Option(help="Of all not yet answered [64,000,000].")] = None,
    max_connections: Annotated[int | None, typer.Option(help="Clients connected at once [4096].")] = None,
    api_keys: Annotated[
        str | None, typer.Option(help="KEY or NAME:KEY, comma separated; safer as NVIUM_API_KEYS or in a file.")
    ] = None,
    api_keys_file: Annotated[Path | None, typer.Option(help="The same, one a line, with # comments.")] = None,
    metrics_open: Annotated[bool | None, typer.Option(help="/metrics asks for no key [off].")] = None,
    requests_per_minute: Annotated[int | None, typer.Option(help="Of each key, or of all without one [any].")] = None,
    playground: Annotated[bool | None, typer.Option(help="A page at / to try the model on [on].")] = None,
    ssl_certfile: Annotated[Path | None, typer.Option(help="Certificate chain (PEM); then https only.")] = None,
    ssl_keyfile: Annotated[Path | None, typer.Option(help="Its key, if not in the same file.")] = None,
    cors_origins: Annotated[str | None, typer.Option(help="Whose pages may call, comma separated [none].")] = None,
    otlp_endpoint: Annotated[str | None, typer.Option(help="OpenTelemetry collector that gets traces [none].")] = None,
    replicas: Annotated[int | None, typer.Option(help="Processes with a model each, by Ray [one, without].")] = None,
    max_replicas: Annotated[int | None, typer.Option(help="As many, if there is enough to do [--replicas].")] = None,
    sequences_per_replica: Annotated[int | None, typer.Option(help="That make enough to do [16].")] = None,
    prefix_affinity: Annotated[bool | None, typer.Option(help="Prompts go where they were seen [on].")] = None,
    upscale_seconds: Annotated[float | None, typer.Option(help="Of more to do, until there are more [10].")] = None,
    downscale_seconds: Annotated[float | None, typer.Option(help="Of less to do, until there are fewer [300].")] = None,
    request_seconds: Annotated[float | None, typer.Option(help="How long a request may take [any time].")] = None,
    arrival_seconds: Annotated[float | None, typer.Option(help="How long a request may take to arrive [60].")] = None,
    slow_client_seconds: Annotated[float | None, typer.Option(help="How long a client may read nothing [60].")] = None,
    drain_seconds: Annotated[float | None, typer.Option(help="How long running requests may finish [30].")] = None,
    keep_alive_seconds: Annotated[float | None, typer.Option(help="Between comments on a silent stream [15].")] = None,
    stall_seconds: Annotated[float | None, typer.Option(help="Without a step, until /livez fails [30].")] = None,
) -> None:
    """Serve a model over HTTP. Every option may also be set as NVIUM_… in the environment."""
    given = {name: value for name, value in locals().items() if value is not None}
    from server.settings import read_settings

    settings = read_settings(given)
    runner(settings)(settings)


def runner(settings: "Settings") -> "Callable[[Settings], None]":
    """What serves: one process, or several by Ray. Raises `SettingsError` where that is not installed."""
    from server.app import run
    from server.settings import PRESUMED_OF_RAY, SettingsError, presume

    if settings.replicas is None:
        if settings.max_replicas is not None:
            raise SettingsError("max_replicas: needs replicas, the number to begin with")
        return run
    presume(PRESUMED_OF_RAY)
    try:
        from server.replicas import launch
    except ImportError as error:
        raise SettingsError(f"replicas: needs `pip install 'nvium[ray]'` ({error})") from error
    return launch.run


def generate(
    model: ModelArgument = None,
    prompt: Annotated[str, typer.Option(help="The text to continue.")] = "Once upon a time",
    max_tokens: Annotated[int, typer.Option(help="At most so many tokens.")] = 128,
    seed: Annotated[int | None, typer.Option(help="Same seed, same text.")] = None,
    temperature: Annotated[float, typer.Option(help="0 is the argmax of π_mix.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Nucleus sampling.")] = 1.0,
    schedule: Annotated[Schedule, typer.Option(help="Which block next.")] = "optimal",
    deterministic: Annotated[bool, typer.Option("--deterministic", help="Same bits on every run.")] = False,
    device: DeviceOption = "auto",
    dtype: PrecisionOption = "auto",
) -> None:
    """Continue a prompt in the terminal, each token coloured by the exit it left at."""
    from rich.console import Console

    from nvium_core import Engine, EngineConfig, SamplingParams, load_model
    from nvium_core.terminal import stream_to

    loaded = load_model(model, device, dtype)
    engine = Engine(loaded.model, EngineConfig(schedule=schedule, deterministic=deterministic, max_sequences=1))
    params = SamplingParams(max_tokens=max_tokens, seed=seed, temperature=temperature, top_p=top_p)
    stream_to(Console(highlight=False), loaded, engine, prompt, params)
