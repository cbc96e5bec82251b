"""A continuation in the terminal: every token in the colour of the exit it left at, and a summary."""

import time
from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text
from tokenizers.decoders import DecodeStream

from nvium_core.engine.engine import Engine
from nvium_core.engine.events import Completion, FailureEvent, TokenEvent
from nvium_core.engine.failures import EngineError
from nvium_core.engine.params import SamplingParams
from nvium_core.loading import LoadedModel

EXIT_COLOURS = ["bright_cyan", "bright_green", "bright_yellow", "bright_magenta", "bright_blue", "bright_red", "white"]


def stream_to(console: Console, loaded: LoadedModel, engine: Engine, prompt: str, params: SamplingParams) -> None:
    """Print the prompt and its continuation as it is spoken, then a summary."""
    prompt_ids = loaded.tokenizer(prompt).input_ids
    engine.add("prompt", prompt_ids, params)
    decoder, completion = DecodeStream(prompt_ids, skip_special_tokens=True), Completion()
    console.print(Text(prompt, "dim"), end="", soft_wrap=True)
    started = time.monotonic()
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, FailureEvent):
                raise EngineError(event.message)
            assert isinstance(event, TokenEvent)
            completion.append(event)
            text = decoder.step(loaded.tokenizer.backend_tokenizer, event.token_id)
            console.print(Text(text or "", exit_colour(event.exit)), end="", soft_wrap=True)
    summarise(console, completion, loaded.model.config.exit_layers or [], time.monotonic() - started)


def exit_colour(exit_number: int) -> str:
    return EXIT_COLOURS[(exit_number - 1) % len(EXIT_COLOURS)]


def summarise(console: Console, completion: Completion, exit_layers: Sequence[int], seconds: float) -> None:
    """Tokens per second, tokens by exit, mean depth."""
    used, num_tokens = Counter(completion.exits), len(completion.exits)
    mean_depth = sum(exit_layers[exit_ - 1] for exit_ in completion.exits) / exit_layers[-1] / num_tokens
    parts = [Text(f"exit {k} (layer {depth}): {used[k]}", exit_colour(k)) for k, depth in enumerate(exit_layers, 1)]
    rate = f"{num_tokens} tokens, {num_tokens / seconds:.1f} tokens/s, mean depth {mean_depth:.2f}"
    console.print(Text("\n\n") + Text(" · ").join([Text(rate), *parts]), soft_wrap=True)
