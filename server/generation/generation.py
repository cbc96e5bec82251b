"""A request's choices from submission to end: tokens become text, choices become one stream of deltas.

Whole and streamed answers are both made of these deltas, so they cannot differ.
"""

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from nvium_core import Admittance, EngineRequest, Key, PromptEvent, SamplingParams, Score, TokenEvent, TokenStream
from nvium_core.text.detokenizer import FinishReason
from server.errors import DeadlineExceeded
from server.generation.choice_text import ChoiceText, Piece, Prompt
from server.generation.service import Service
from server.schemas.generation import GenerationRequest
from server.telemetry.record import RequestRecord

Events = Sequence[TokenEvent | PromptEvent]


@dataclass(slots=True)
class Delta:
    """What a choice gained: text that is certain, the tokens of that moment, and scores of further prompt tokens."""

    choice: "Choice"
    text: str = ""
    tokens: list[TokenEvent] = field(default_factory=list)
    text_offsets: list[int] = field(default_factory=list)
    prompt_scores: list[Score] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    def extend(self, later: "Delta") -> None:
        """Take in what the choice gained afterwards."""
        self.text += later.text
        self.tokens += later.tokens
        self.text_offsets += later.text_offsets
        self.prompt_scores += later.prompt_scores
        self.finish_reason, self.stop_reason = later.finish_reason, later.stop_reason


class Choice:
    """One sequence of the engine and the text it becomes. A prompt's first choice is its leader."""

    def __init__(
        self,
        index: int,
        prompt: Prompt,
        text: ChoiceText,
        record: RequestRecord,
        *,
        is_leader: bool = True,
        num_unscored: int = 0,
    ) -> None:
        self.index = index
        self.num_unscored = num_unscored
        """Tokens of the prompt whose scores are owed."""
        self._is_leader = is_leader
        self.prompt = prompt
        self.text = text
        self.num_cached_tokens = 0
        self._has_begun = False
        self._record = record
        self._submitted = time.monotonic()
        self._last_arrival: float | None = None

    def take(self, events: Events, admission: Admittance) -> Delta:
        """What becomes of the next events."""
        self.note(admission)
        tokens = [event for event in events if isinstance(event, TokenEvent)]
        if tokens:
            self._note_arrival(len(tokens))
        delta = self._delta(self.text.take(tokens))
        if len(tokens) < len(events):
            self._take_scores([event for event in events if isinstance(event, PromptEvent)], delta)
        return delta

    def _take_scores(self, of_prompt: Sequence[PromptEvent], delta: Delta) -> None:
        delta.prompt_scores = [score for event in of_prompt for score in event.scores]
        self.num_unscored -= len(delta.prompt_scores)
        if of_prompt[-1].finish_reason:
            delta.extend(self.end(of_prompt[-1].finish_reason))

    def end(self, reason: FinishReason) -> Delta:
        """The last delta of a choice that ends without a token."""
        return self._delta(self.text.end(reason))

    def _delta(self, piece: Piece) -> Delta:
        self._record.served(piece.tokens, piece.finish_reason)
        return Delta(self, piece.text, piece.tokens, piece.text_offsets, [], piece.finish_reason, piece.stop_reason)

    def note(self, admission: Admittance) -> None:
        """Tell the record, once, when the choice left the queue; also of one that will not speak."""
        if not self._has_begun:
            self._has_begun = True
            self.num_cached_tokens = admission.num_cached_prompt_tokens
            self._record.left_queue(admission.at - self._submitted)
            if self._is_leader:
                self._record.found_in_cache(admission.num_cached_prompt_tokens)

    def _note_arrival(self, num_tokens: int) -> None:
        now = time.monotonic()
        if self._last_arrival is None:
            self._record.first_tokens(now)
        else:
            self._record.later_tokens(num_tokens, now - self._last_arrival)
        self._last_arrival = now


class Generation:
    """All choices of one request. Whoever has it must close it, which frees what still runs.

    At `deadline`, by the event loop's clock, what runs ends with "length"; what has not begun, or still owes scores of
    its prompt, is refused, as half of them would look like all.
    """

    def __init__(
        self, stream: TokenStream, choices: Sequence[Choice], leave: Callable[[], None], deadline: float | None
    ) -> None:
        self.choices = list(choices)
        self._stream = stream
        self._leave = leave
        self._open = dict(zip(stream.keys, choices, strict=True))
        self._alarm = None if deadline is None else asyncio.get_running_loop().call_at(deadline, stream.close)

    @property
    def is_over(self) -> bool:
        return not self._open

    def listen(self, listener: Callable[[], object]) -> None:
        """Have it called whenever there is something to take."""
        self._stream.listen(listener)

    def take(self) -> list[Delta]:
        """What was gained since the last time, a delta for each choice that gained something.

        Raises `EngineError` if a choice fails, `DeadlineExceeded` if none began in time or scores of a prompt are still
        owed then.
        """
        deltas = [self._take(key, told) for key, told in by_key(self._stream.take()).items()]
        return deltas + self._expire() if self._stream.is_over and self._open else deltas

    async def collect(self) -> list[Delta]:
        """What each choice gained in all. Raises as `take`."""
        gained = {choice: Delta(choice) for choice in self.choices}
        while not self.is_over:
            await self._stream.arrival()
            for delta in self.take():
                gained[delta.choice].extend(delta)
        return list(gained.values())

    def close(self) -> None:
        if self._alarm:
            self._alarm.cancel()
        self._stream.close()
        for key in list(self._open):
            self._end(key)

    def _take(self, key: Key, events: Events) -> Delta:
        delta = self._open[key].take(events, self._stream.admissions[key])
        if delta.finish_reason:
            self._end(key)
        return delta

    def _expire(self) -> list[Delta]:
        if not self._stream.admissions or any(choice.num_unscored for choice in self._open.values()):
            raise DeadlineExceeded
        deltas = [choice.end("length") for choice in self._open.values()]
        self.close()
        return deltas

    def _end(self, key: Key) -> None:
        self._stream.cancel(key)
        choice = self._open.pop(key)
        if admission := self._stream.admissions.get(key):
            choice.note(admission)
        self._leave()


def by_key(events: Events) -> dict[Key, list[TokenEvent | PromptEvent]]:
    """Events of the same choice together, in their order."""
    together: dict[Key, list[TokenEvent | PromptEvent]] = {}
    for event in events:
        together.setdefault((event.sequence_id, event.choice), []).append(event)
    return together


def start(
    service: Service,
    request: GenerationRequest,
    params: SamplingParams,
    prompts: Sequence[Prompt],
    record: RequestRecord,
    *,
    tenant: str = "",
    echo: bool = False,
    stops: Sequence[str] = (),
) -> Generation:
    """Submit every choice of a request that was let in, or raise and leave none behind. `stops` are beside its own.

    Without a seed each prompt gets one of its own, shared by its choices, as if it had been sent alone.
    """
    num_choices = len(prompts) * params.num_choices
    asked = [EngineRequest(p.token_ids, replace(params, seed=seed_for(request))) for p in prompts]
    num_new = num_choices * params.max_tokens
    num_scored = params.num_choices * sum(len(p.token_ids) for p in prompts) if params.prompt_logprobs else 0
    for prompt in asked:
        service.engine.check(prompt.token_ids, prompt.params)
    service.check_new_tokens(num_new)
    service.check_scored_tokens(num_scored)
    service.check_alternatives((num_new + num_scored) * (params.logprobs or 0))
    owners = [prompt for prompt in prompts for _ in range(params.num_choices)]
    texts = [choice_text(service, request, prompt, stops, echo=echo) for prompt in owners]
    stream = service.worker.submit(asked, tenant)
    record.admitted(sum(len(prompt.token_ids) for prompt in prompts))
    choices = [
        Choice(
            number,
            prompt,
            text,
            record,
            is_leader=number % params.num_choices == 0,
            num_unscored=len(prompt.token_ids) - 1 if params.prompt_logprobs else 0,
        )
        for number, (prompt, text) in enumerate(zip(owners, texts, strict=True))
    ]
    return Generation(stream, choices, service.admission.leave, service.deadline(record.arrived))


def seed_for(request: GenerationRequest) -> int:
    return secrets.randbits(63) if request.seed is None else request.seed


def choice_text(
    service: Service,
    request: GenerationRequest,
    prompt: Prompt,
    stops: Sequence[str],
    *,
    echo: bool,
) -> ChoiceText:
    return ChoiceText(
        service.tokenizer,
        prompt,
        [*request.stops, *stops],
        include_stop=request.include_stop_str_in_output,
        echo=echo,
        skips_special=request.skip_special_tokens,
        end_token_ids=service.engine.end_token_ids,
    )
