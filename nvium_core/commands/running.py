"""`nvium serve`, `nvium generate` and `nvium chat`."""

import gc
import os
import signal
import sys
from dataclasses import fields
from typing import Annotated, Any

import typer

from nvium_core.commands.options import ModelArgument, takes
from nvium_core.engine.config import EngineConfig
from nvium_core.engine.errors import InvalidRequest, require, require_threshold
from nvium_core.options import ModelOptions, SamplingOptions, ServerOptions

BUNDLED = "The bundled model only writes short tales. Ask it: Tell me a tale of a fox. Then enter /reset."
ENGINE_OPTIONS = "schedule", "deterministic", "max_drafts", "cache_dtype"


@takes(ServerOptions)
def serve(model: ModelArgument = None, **given: Any) -> None:
    """Serve a model over HTTP. Every option may also be set as NVIUM_… in the environment."""
    # Exit on SIGTERM until the server installs its own handler, because PID 1 of a container ignores SIGTERM by
    # default. Exit with `os._exit`, because a module that is being imported may swallow an exception.
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(0))
    gc.disable()  # until the server is ready: collections take a tenth of its start
    try:
        from nvium_core.text.renderer import RENDERER
        from server.settings import read_settings
        from server.telemetry.logs import configure_logs, logged_if_slow

        settings = read_settings(given if model is None else given | {"model": model})
        configure_logs(settings.log_level)
        if settings.model and not settings.replicas:  # its chat template is probably not ours
            RENDERER.prepare()  # takes as long as the imports below
        with logged_if_slow("starting"):
            if settings.replicas:
                from server.replicas.gateway import run
            else:
                from server.app import run
        run(settings)
    finally:
        gc.enable()


@takes(ModelOptions)
@takes(ServerOptions, "generation_config")
@takes(EngineConfig, *ENGINE_OPTIONS)
@takes(SamplingOptions)
def generate(
    model: ModelArgument = None,
    prompt: Annotated[str, typer.Option(help="The text to continue; - reads standard input.")] = "Once upon a time",
    max_tokens: Annotated[int, typer.Option(help="Maximum number of tokens to generate.")] = 128,
    **given: Any,
) -> None:
    """Continue a prompt in the terminal, each token coloured by its exit. Statistics go to standard error."""
    from nvium_core import LLM, terminal

    try:
        text = sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt
        text.encode()
    except UnicodeError as error:
        raise InvalidRequest("prompt", "must be valid UTF-8 text") from error
    params = chosen_params(given, max_tokens)
    terminal.continue_text(terminal.Terminal(), LLM(model, max_sequences=1, **given), text, params)


@takes(ModelOptions)
@takes(ServerOptions, "generation_config")
@takes(EngineConfig, *ENGINE_OPTIONS)
@takes(SamplingOptions)
def chat(
    model: ModelArgument = None,
    system: Annotated[str | None, typer.Option(help="The system prompt.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Maximum number of tokens per answer [the rest of the context].")
    ] = None,
    **given: Any,
) -> None:
    """Chat with a model through its chat template; each line of standard input is a message."""
    from nvium_core import LLM, SamplingParams, terminal

    params = chosen_params(given, max_tokens)
    SamplingParams(**params)  # check the values before loading the model
    llm, streams = LLM(model, max_sequences=1, **given), terminal.Terminal()
    if model is None:
        streams.remarks.print(BUNDLED, style="dim")
    terminal.converse(streams, llm, typed_line if sys.stdin.isatty() else input, system, params)


def typed_line() -> str:
    """Ask for a line. Raise `EOFError` at Ctrl-D and `KeyboardInterrupt` at Ctrl-C, on a line of their own."""
    import readline  # noqa: F401 (importing it gives input() line editing)

    try:
        return input("> ")
    except (EOFError, KeyboardInterrupt):
        print(file=sys.stderr)
        raise


def chosen_params(given: dict[str, Any], max_tokens: int | None) -> dict[str, Any]:
    """Move the sampling parameters out of the given options."""
    params = {field.name: given.pop(field.name) for field in fields(SamplingOptions) if field.name in given}
    threshold = params.pop("exit_threshold", None)
    if params.get("sampling") == "threshold" or threshold is not None:
        require(threshold is not None, "exit_threshold", "required by sampling 'threshold'")
        require_threshold(threshold, "exit_threshold")
        params["threshold"] = threshold
    return params if max_tokens is None else params | {"max_tokens": max_tokens}
