"""`nvium serve`, and `nvium generate` in the terminal."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nvium_core.commands.options import ModelArgument, chosen, takes
from nvium_core.engine.params import EngineConfig
from nvium_core.options import ModelOptions, ServerOptions

if TYPE_CHECKING:
    from server.settings import Settings


@takes(ServerOptions)
def serve(model: ModelArgument = None, **given: Any) -> None:
    """Serve a model over HTTP. Every option may also be set as NVIUM_… in the environment."""
    from server.settings import read_settings

    settings = read_settings(given if model is None else given | {"model": model})
    runner(settings)(settings)


def runner(settings: "Settings") -> "Callable[[Settings], None]":
    """One process, or several by Ray. Raises `SettingsError` where Ray is not installed."""
    from server.app import run
    from server.settings import RAY_DEFAULTS, SettingsError, set_defaults

    if settings.replicas is None:
        if settings.max_replicas is not None:
            raise SettingsError("max_replicas: needs replicas, the number to begin with")
        return run
    set_defaults(RAY_DEFAULTS)
    try:
        from server.replicas import launch
    except ImportError as error:
        raise SettingsError(f"replicas: needs `pip install 'nvium[ray]'` ({error})") from error
    return launch.run


@takes(ModelOptions)
@takes(EngineConfig, "schedule", "deterministic")
def generate(
    model: ModelArgument = None,
    prompt: Annotated[str, typer.Option(help="The text to continue.")] = "Once upon a time",
    max_tokens: Annotated[int, typer.Option(help="At most so many tokens.")] = 128,
    seed: Annotated[int | None, typer.Option(help="Same seed, same text.")] = None,
    temperature: Annotated[float, typer.Option(help="0 is the argmax of π_mix.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Nucleus sampling.")] = 1.0,
    **given: Any,
) -> None:
    """Continue a prompt in the terminal, each token coloured by its exit."""
    from rich.console import Console

    from nvium_core import Engine, SamplingParams, load_model
    from nvium_core.terminal import stream_to

    options = chosen(ModelOptions, given)
    loaded = load_model(model, options.device, options.dtype)
    engine = Engine(loaded.model, chosen(EngineConfig, given, max_sequences=1))
    params = SamplingParams(max_tokens=max_tokens, seed=seed, temperature=temperature, top_p=top_p)
    stream_to(Console(highlight=False), loaded, engine, prompt, params)
