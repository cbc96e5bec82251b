"""`nvium generate` and `nvium chat`: a model in the terminal."""

import sys
from typing import Annotated, Any

import typer

from nvium_core.choices import SUGGESTED, Sampling
from nvium_core.commands.options import ModelArgument, chosen, takes
from nvium_core.engine.params import EngineConfig
from nvium_core.options import ModelOptions

STDIN = "-"
BUNDLED = "The bundled model tells short tales and does not converse. Ask: Tell me a tale of a fox. Then /reset."
ENGINE_OPTIONS = "schedule", "deterministic", "max_drafts"

SeedOption = Annotated[int | None, typer.Option(help="Same seed, same text.")]
TemperatureOption = Annotated[float, typer.Option(help="0 is the most probable token.")]
SamplingOption = Annotated[
    Sampling | None, typer.Option(help="From the exit taken, the mixture or the last exit [as the model says].")
]
TopPOption = Annotated[float, typer.Option(help="Nucleus sampling.")]


@takes(ModelOptions)
@takes(EngineConfig, *ENGINE_OPTIONS)
def generate(
    model: ModelArgument = None,
    prompt: Annotated[str, typer.Option(help="The text to continue; - reads standard input.")] = "Once upon a time",
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate at most.")] = 128,
    seed: SeedOption = None,
    temperature: TemperatureOption = SUGGESTED["temperature"],
    top_p: TopPOption = SUGGESTED["top_p"],
    sampling: SamplingOption = None,
    **given: Any,
) -> None:
    """Continue a prompt in the terminal, each token coloured by its exit. Statistics go to standard error."""
    from nvium_core import terminal

    text = sys.stdin.read().removesuffix("\n") if prompt == STDIN else prompt
    asked = {"max_tokens": max_tokens, "seed": seed, "temperature": temperature, "top_p": top_p, "sampling": sampling}
    terminal.continue_text(terminal.both_streams(), language_model(model, given), text, asked)


@takes(ModelOptions)
@takes(EngineConfig, *ENGINE_OPTIONS)
def chat(
    model: ModelArgument = None,
    system: Annotated[str | None, typer.Option(help="The system prompt.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Of each answer, at most [the rest of the context].")] = None,
    seed: SeedOption = None,
    temperature: TemperatureOption = SUGGESTED["temperature"],
    top_p: TopPOption = SUGGESTED["top_p"],
    sampling: SamplingOption = None,
    **given: Any,
) -> None:
    """Talk to a model in the terminal, through its chat template; each line of standard input is a message."""
    from nvium_core import SamplingParams, terminal

    asked: dict[str, Any] = {"seed": seed, "temperature": temperature, "top_p": top_p, "sampling": sampling}
    if max_tokens is not None:
        asked["max_tokens"] = max_tokens
    SamplingParams(**asked)  # refuse what is out of range before the model is loaded
    llm, streams = language_model(model, given), terminal.both_streams()
    if model is None:
        streams.remarks.print(BUNDLED, style="dim")
    terminal.converse(streams, llm, lambda: ask(is_person=sys.stdin.isatty()), system, asked)


def ask(*, is_person: bool) -> str:
    """A line of input, with a prompt and editing for a person. Raises `EOFError` at its end."""
    if is_person:
        import readline  # noqa: F401 (input() edits lines once it is imported)
    return input("> " if is_person else "")


def language_model(model: str | None, given: dict[str, Any]) -> Any:
    from nvium_core import LLM

    options = chosen(ModelOptions, given)
    engine = {name: given[name] for name in (*ENGINE_OPTIONS, "instructions", "threads") if name in given}
    loading = {name: getattr(options, name) for name in ("exits", "device", "dtype", "weights")}
    return LLM(model, **loading, max_sequences=1, **engine)
