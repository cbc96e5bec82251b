"""Log lines for a terminal. Known events become sentences; other events show their name and fields."""

from collections.abc import Mapping
from typing import Any

from structlog.typing import EventDict, WrappedLogger

SENTENCES = {
    "starting": "Starting; importing PyTorch and the server …",
    "loading": "Loading {model} …",
    "loaded": "Loaded {model} in {seconds:.1f} s: {num_parameters:,} parameters, weights in {weights}, {arithmetic} on "
    "{device}.",
    "serving": "Up to {max_sequences} sequences at once, of up to {context:,} tokens; the cache holds {cache}.",
    "warming up": "Warming up …",
    "warm": "Warmed up in {seconds:.1f} s.",
    "ready": "Ready. Playground: {url}/  OpenAI's API: {url}/v1  Stop: Ctrl-C",
    "ready, no playground": "Ready. OpenAI's API: {url}/v1  Stop: Ctrl-C",
    "saying goodbye": "Accepting requests for another {seconds:g} s, while /readyz fails. Ctrl-C again stops at once.",
    "draining": "Finishing {choices} answers, for at most {seconds:g} s. Ctrl-C again stops at once.",
    "stopped": "Stopped.",
    "request": "{endpoint}: {status} {outcome}, {prompt_tokens} tokens in, {completion_tokens} out, "
    "{total_seconds:.2f} s",
    "other request": "{target}: {status} {outcome}, {total_seconds:.2f} s",
}
"""Sentence templates by event."""

HIDDEN = ("event", "level", "timestamp", "exception")


def in_words(_logger: WrappedLogger, _method: str, event: EventDict) -> str:
    """Render an event. This is structlog's last processor."""
    level = event.get("level", "info")
    return sentence(event) if level == "info" else f"{level}: {sentence(event)}"


def sentence(event: Mapping[str, Any]) -> str:
    name = str(event.get("event", ""))
    if name == "ready" and not event.get("playground"):
        name = "ready, no playground"
    if name == "request" and event.get("target"):
        name = "other request"
    try:
        return SENTENCES[name].format_map(event)
    except (KeyError, TypeError, ValueError):  # no template, or a field is missing or None
        fields = [f"{key}={value}" for key, value in event.items() if key not in HIDDEN and value not in (None, "")]
        return "\n".join([" ".join([name, *fields]), *filter(None, [event.get("exception")])])
