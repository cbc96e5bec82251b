"""Runs a request's choices from submission to completion, as one stream of deltas.

Whole and streamed responses are built from the same deltas, so they agree.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from operator import itemgetter

from nvium_core import (
    Admitted,
    ChoiceKey,
    InvalidRequest,
    PromptEvent,
    SamplingParams,
    Score,
    TokenEvent,
    TokenStream,
)
from server.errors import UNSUPPORTED, deadline_exceeded
from server.generation.choice_text import ChoiceText, Delta, Prompt
from server.generation.reasoning_budget import ReasoningBudget
from server.generation.service import MAX_ALTERNATIVES, Service
from server.schemas.body import require
from server.schemas.chat import ChatRequest
from server.schemas.generation import GenerationRequest
from server.telemetry.record import RequestRecord


class Choice:
    """One sequence of the engine, and its text.

    The first choice of a prompt is the `leader` of the prompt's other choices. If `is_scored`, the engine sends the
    prompt's scores to the leader only. The deltas of every choice start with these scores.
    """

    def __init__(
        self, text: ChoiceText, record: RequestRecord, leader: "Choice | None" = None, *, is_scored: bool = False
    ) -> None:
        self.index = text.index
        self.prompt = text.prompt
        self.text = text
        self.num_unscored = len(text.prompt.token_ids) - 1 if is_scored and leader is None else 0
        """Number of prompt tokens whose scores have not arrived."""
        self.num_cached_tokens = 0
        self._leader = leader
        self.prompt_scores: list[Score] = []
        self._has_begun = False
        self.record = record
        self._submitted = time.monotonic()
        self.last_arrival: float | None = None
        """When the last token arrived; None before the first."""

    @property
    def awaits_scores(self) -> bool:
        return self._leader is not None and self._leader.num_unscored > 0

    def add(self, events: Sequence[TokenEvent | PromptEvent], admission: Admitted) -> Delta:
        self.note_admission(admission)
        tokens = [event for event in events if isinstance(event, TokenEvent)]
        if tokens:
            now = time.monotonic()
            self.record.tokens_arrived(len(tokens), now, self.last_arrival)
            self.last_arrival = now
        delta = self.text.add(tokens)
        if self._leader and self._leader.prompt_scores:
            delta.prompt_scores, self._leader = self._leader.prompt_scores, None
        self.record.served(delta.tokens)
        if len(tokens) < len(events):
            self._take_scores([event for event in events if isinstance(event, PromptEvent)], delta)
        return delta

    def _take_scores(self, of_prompt: Sequence[PromptEvent], delta: Delta) -> None:
        delta.prompt_scores = [score for event in of_prompt for score in event.scores]
        self.prompt_scores += delta.prompt_scores
        self.num_unscored -= len(delta.prompt_scores)
        if of_prompt[-1].finish_reason:
            delta.extend(self.text.end(of_prompt[-1].finish_reason))

    def note_admission(self, admission: Admitted) -> None:
        """At the first call, record that the choice has left the queue."""
        if not self._has_begun:
            self._has_begun = True
            self.num_cached_tokens = admission.num_cached_prompt_tokens
            num_cached = self.num_cached_tokens if self._leader is None else 0  # count shared rows once
            self.record.left_queue(admission.at - self._submitted, num_cached)


class Generation:
    """All choices of one request. The caller must close it, which cancels the unfinished choices.

    At `deadline`, by the event loop's clock, running choices end with finish reason "length". The request fails instead
    if no token has arrived, or if prompt scores are missing: a client would take partial scores for complete scores.
    """

    def __init__(
        self,
        stream: TokenStream,
        choices: Sequence[Choice],
        params: SamplingParams,
        leave: Callable[[], None],
        deadline: float | None,
    ) -> None:
        self.choices = list(choices)
        self.params = params
        self.ignored: list[str] = []
        """Request fields that have no effect."""
        self.listen = stream.listen
        self._stream = stream
        self._leave = leave
        self._held: dict[ChoiceKey, list[TokenEvent | PromptEvent]] = {}
        """Events of choices that await their prompt's scores."""
        self._open = dict(zip(stream.keys, choices, strict=True))
        self._alarm = None if deadline is None else asyncio.get_running_loop().call_at(deadline, stream.close)

    @property
    def is_over(self) -> bool:
        return not self._open

    def take(self) -> list[Delta]:
        """Return one delta for each choice that received events since the last call.

        Raise `EngineError` if a choice failed, or `Rejected` if the request failed at its deadline.
        """
        deltas, arrived, held, self._held = [], self._stream.take(), self._held, {}
        for key, events in held.items():
            arrived[key] = events + arrived.get(key, [])
        for key in sorted(arrived, key=itemgetter(1)):  # a prompt's first choice, which gets its scores, is first
            if self._open[key].awaits_scores:
                self._held[key] = arrived[key]
                continue
            deltas.append(delta := self._open[key].add(arrived[key], self._stream.admissions[key]))
            if delta.finish_reason:
                self._end(key)
        return deltas + self._expire() if self._stream.is_over and self._open else deltas

    async def collect(self) -> list[Delta]:
        """Wait for all choices to end and return one delta each. Raise the errors of `take`."""
        totals = [Delta(choice.index) for choice in self.choices]
        while not self.is_over:
            await self._stream.arrival()
            for delta in self.take():
                totals[delta.index].extend(delta)
        return totals

    def close(self) -> None:
        if self._alarm:
            self._alarm.cancel()
        self._stream.close()
        for key in list(self._open):
            self._open[key].record.choice_ended("abort")
            self._end(key)

    def _expire(self) -> list[Delta]:
        has_begun = any(choice.last_arrival is not None for choice in self.choices)
        if not has_begun or any(choice.num_unscored for choice in self._open.values()):
            raise deadline_exceeded()
        deltas = [choice.text.end("length") for choice in self._open.values()]
        for key in list(self._open):
            self._end(key)
        return deltas

    def _end(self, key: ChoiceKey) -> None:
        self._stream.cancel(key)
        choice = self._open.pop(key)
        if admission := self._stream.admissions.get(key):
            choice.note_admission(admission)
        self._leave()


def start(
    service: Service,
    request: GenerationRequest,
    params: SamplingParams,
    prompts: Sequence[Prompt],
    record: RequestRecord,
    *,
    echo: bool = False,
    stops: Sequence[str] = (),
    ignored: Sequence[str] = (),
) -> Generation:
    """Submit every choice of an admitted request. Cancel all of them if anything raises.

    `stops` are stop strings in addition to the request's own. `ignored` are the paths of schema keywords that are not
    enforced. If the request has no seed, each prompt gets a random seed, which its choices share.
    """
    check_totals(service, params, prompts)
    text_of = partial(
        ChoiceText,
        service.tokenizer,
        [*request.stops, *stops],
        include_stop=request.include_stop_str_in_output,
        min_tokens=request.min_tokens,
        echo=echo,
    )
    prompt_of_choice = [prompt for prompt in prompts for _ in range(params.num_choices)]
    token_ids = [prompt.token_ids for prompt in prompts]
    stream = service.worker.submit(token_ids, params, record.key_id, request.cache_salt or "")
    with ExitStack() as undo:
        undo.callback(stream.close)
        texts = [text_of(index, prompt) for index, prompt in enumerate(prompt_of_choice)]
        record.admitted(sum(map(len, token_ids)))
        choices = choices_of(texts, record, params)
        deadline = service.deadline(record.arrived_at)
        generation = Generation(stream, choices, params, service.admission.leave, deadline)
        generation.ignored += ignored
        if request.requested_max_tokens is not None and params.max_tokens < request.requested_max_tokens:
            generation.ignored.append(request.name_of("max_tokens"))
        undo.pop_all()
        return generation


async def start_chat(
    service: Service, chat: ChatRequest, record: RequestRecord, *, truncates: bool = False
) -> Generation:
    """Admit the request, render its prompt and submit it to the engine. If a step raises, undo the previous steps.

    If it `truncates`, the oldest messages of a long prompt are dropped.
    """
    template, budget = service.chat_template, chat.reasoning_budget
    message = "not supported: the model's chat template has no reasoning"
    require(budget is None or template.thinks, chat.name_of("thinking_budget"), message, code=UNSUPPORTED)
    with service.admission.entered(chat.num_choices), chat.in_request_names():
        output_format = chat.output_format(template.call_format, template.call_marker)
        is_text = output_format is None or output_format.is_text
        require(is_text or not chat.continued, "continue_final_message", "cannot be combined with an output format")
        async with service.within_deadline(record.arrived_at):
            check = partial(service.check_length, chat.name_of("messages"))
            render = partial(service.chat_prompt, chat, check, truncates=truncates)
            prompt = Prompt(await service.text_threads.run(render))
            compiled = await service.constraint(output_format)
        reasoning = template.reasoning_parser(prompt.token_ids, chat.continued)
        constraint = compiled.constraint
        is_limited = budget is not None or (output_format is not None and reasoning.state == "thinking")
        if is_limited and reasoning.state in ("start", "thinking"):
            constraint = ReasoningBudget(service.tags, reasoning, budget, constraint)
        max_tokens = service.max_tokens(
            chat.requested_max_tokens, len(prompt.token_ids), chat.num_choices, chat.top_logprobs
        )
        stop_token_ids, stops = template.ends(ignore_eos=chat.ignore_eos)
        params = chat.params(constraint, max_tokens, stop_token_ids, service.sampling_defaults)
        return start(
            service,
            chat,
            params,
            [prompt],
            record,
            stops=stops if is_text else (),
            ignored=[*compiled.ignored, *chat.ineffective(template)],
        )


def choices_of(texts: Sequence[ChoiceText], record: RequestRecord, params: SamplingParams) -> list[Choice]:
    choices: list[Choice] = []
    for text in texts:
        place = text.index % params.num_choices
        choices.append(Choice(text, record, choices[-place] if place else None, is_scored=params.prompt_logprobs))
    return choices


def check_totals(service: Service, params: SamplingParams, prompts: Sequence[Prompt]) -> None:
    """Raise `InvalidRequest` if the prompts exceed a limit together. `submit` checks each prompt."""
    lengths = [len(prompt.token_ids) for prompt in prompts]
    if max(lengths) + params.max_tokens > service.engine.context:
        return  # `submit` refuses the prompt and names the context
    num_new, num_prompt = len(prompts) * params.num_choices * params.max_tokens, sum(lengths)
    num_scored = params.num_choices * num_prompt if params.prompt_logprobs else 0
    num_alternatives = (num_new + num_scored) * (params.logprobs or 0)
    limit = service.settings.max_new_tokens
    if num_new > limit:
        raise InvalidRequest("max_tokens", f"prompts × choices × max_tokens must be at most {limit}, got {num_new}")
    if num_scored > limit:
        message = f"with prompt log-probabilities, choices × prompt tokens must be at most {limit}, got {num_scored}"
        raise InvalidRequest("prompt", message)
    if num_alternatives > MAX_ALTERNATIVES:
        message = f"alternatives × tokens of all choices must be at most {MAX_ALTERNATIVES}, got {num_alternatives}"
        raise InvalidRequest("logprobs", message)
