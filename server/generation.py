"""A request's choices from submission to end: tokens become text, choices become one stream of deltas.

Whole and streamed answers are both made of these deltas, so they cannot differ.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Literal

from tokenizers import Tokenizer

from nvium_core import TokenEvent, TokenStream
from server.record import RequestRecord
from server.schemas import CompletionRequest
from server.service import Prompt, Service
from server.text import REPLACEMENT, Detokenizer, StopStrings

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Delta:
    """What a choice gained: text that is certain, and the tokens of that moment, whose text may still be held back."""

    choice: "Choice"
    text: str
    tokens: list[TokenEvent]
    finish_reason: FinishReason | None


class ChoiceText:
    """The text of one choice, token by token, up to a stop string."""

    def __init__(self, tokenizer: Tokenizer, prompt: Prompt, request: CompletionRequest) -> None:
        self._includes_stop = request.include_stop_str_in_output
        self._stops = StopStrings(request.stops, include=self._includes_stop)
        echo_tokens = prompt.text is None and request.echo
        is_context = not (echo_tokens or (prompt.text or "").endswith(REPLACEMENT))
        self._detokenizer = Detokenizer(tokenizer, prompt.token_ids if is_context else [])
        self._pending = (prompt.text or "") if request.echo else ""
        if echo_tokens:
            self._pending = "".join(map(self._detokenizer.push, prompt.token_ids))

    def take(self, tokens: list[TokenEvent]) -> tuple[str, int, FinishReason | None]:
        """The text these give, how many of them were needed for it, and whether it is the last."""
        text, self._pending = self._pending, ""
        for number, event in enumerate(tokens, start=1):
            text += self._push(event)
            if self._stops.matched:
                return text, number, "stop"
            if event.finish_reason:
                return text + self._stops.flush(), number, event.finish_reason
        return text, len(tokens), None

    def _push(self, event: TokenEvent) -> str:
        is_stop_token = event.finish_reason == "stop" and not self._includes_stop
        text = "" if is_stop_token else self._detokenizer.push(event.token_id)
        if event.finish_reason:
            text += self._detokenizer.flush()
        return self._stops.push(text)


class Choice:
    """One sequence of the engine and the text it becomes."""

    def __init__(
        self, index: int, prompt: Prompt, text: ChoiceText, stream: TokenStream, record: RequestRecord
    ) -> None:
        self.index = index
        self.prompt = prompt
        self.stream = stream
        self._text = text
        self._record = record
        self._submitted = time.monotonic()
        self._last_arrival: float | None = None

    async def deltas(self) -> AsyncIterator[Delta]:
        async for events in self.stream:
            tokens = [event for event in events if isinstance(event, TokenEvent)]
            self._note_arrival(len(tokens))
            text, num_taken, finish_reason = self._text.take(tokens)
            if finish_reason:
                self.stream.cancel()
            self._record.served(tokens[:num_taken], finish_reason)
            yield Delta(self, text, tokens[:num_taken], finish_reason)

    def _note_arrival(self, num_tokens: int) -> None:
        now = time.monotonic()
        if self._last_arrival is None:
            self._record.left_queue((self.stream.admitted_at or now) - self._submitted)
            self._record.first_tokens(now)
        else:
            self._record.later_tokens(num_tokens, now - self._last_arrival)
        self._last_arrival = now


class Generation:
    """All choices of one request. Whoever has it must close it, which frees what still runs."""

    def __init__(self, choices: list[Choice], leave: Callable[[], None]) -> None:
        self.choices = choices
        self._leave = leave
        self._open = set(choices)
        self._pumps: list[asyncio.Task[None]] = []

    @property
    def is_finished(self) -> bool:
        return not self._open

    async def deltas(self) -> AsyncIterator[Delta]:
        """The choices' deltas as they come. Raises `EngineError` if one of them fails."""
        async for delta in self.choices[0].deltas() if len(self.choices) == 1 else self._merged():
            if delta.finish_reason:
                self._end(delta.choice)
            yield delta

    def close(self) -> None:
        for pump in self._pumps:
            pump.cancel()
        for choice in list(self._open):
            self._end(choice)

    def _end(self, choice: Choice) -> None:
        choice.stream.cancel()
        self._open.remove(choice)
        self._leave()

    async def _merged(self) -> AsyncIterator[Delta]:
        arrivals: asyncio.Queue[Delta | Exception] = asyncio.Queue()
        self._pumps = [asyncio.create_task(pump(choice, arrivals)) for choice in self.choices]
        while self._open:
            arrival = await arrivals.get()
            if isinstance(arrival, Exception):
                raise arrival
            yield arrival


async def pump(choice: Choice, arrivals: "asyncio.Queue[Delta | Exception]") -> None:
    """Put a choice's deltas into a queue, and its failure."""
    try:
        async for delta in choice.deltas():
            arrivals.put_nowait(delta)
    except Exception as error:
        arrivals.put_nowait(error)


def start(service: Service, request: CompletionRequest, prompts: list[Prompt], record: RequestRecord) -> Generation:
    """Submit every choice of a request, or raise and leave none behind.

    Without a seed each prompt gets one of its own, shared by its choices, as if it had been sent alone.
    """
    params = request.sampling()
    num_choices = len(prompts) * params.num_choices
    for prompt in prompts:
        service.engine.check(prompt.token_ids, params)
    service.admission.enter(num_choices)
    choices: list[Choice] = []
    try:
        for prompt in prompts:
            seed = secrets.randbits(63) if request.seed is None else request.seed
            for stream in service.worker.submit(prompt.token_ids, replace(params, seed=seed)):
                text = ChoiceText(service.tokenizer, prompt, request)
                choices.append(Choice(len(choices), prompt, text, stream, record))
    except BaseException:
        for choice in choices:
            choice.stream.cancel()
        service.admission.leave(num_choices)
        raise
    record.admitted(sum(len(prompt.token_ids) for prompt in prompts))
    return Generation(choices, service.admission.leave)
