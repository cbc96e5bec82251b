"""Runs a request's choices from submission to completion, as one stream of deltas.

Whole and streamed responses are built from the same deltas, so they agree.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from operator import itemgetter

from nvium_core import (
    ChoiceKey,
    InvalidRequest,
    PromptEvent,
    SamplingParams,
    TokenEvent,
    TokenStream,
)
from nvium_core.text.detokenizer import StopStrings
from server.errors import UNSUPPORTED, deadline_exceeded
from server.generation.choice import Choice, Delta, Prompt
from server.generation.reasoning_budget import ReasoningBudget
from server.generation.service import MAX_ALTERNATIVES, Service
from server.schemas.body import require
from server.schemas.chat import ChatRequest
from server.schemas.generation import GenerationRequest
from server.telemetry.record import RequestRecord


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
        deltas = [choice.end("length") for choice in self._open.values()]
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
    token_ids = [prompt.token_ids for prompt in prompts]
    stream = service.worker.submit(token_ids, params, record.key_id, request.cache_salt or "")
    with ExitStack() as undo:
        undo.callback(stream.close)
        record.admitted(sum(map(len, token_ids)))
        choices: list[Choice] = []
        for index in range(len(prompts) * params.num_choices):
            number, place = divmod(index, params.num_choices)
            choices.append(
                Choice(
                    index,
                    prompts[number],
                    record,
                    service.tokenizer,
                    StopStrings([*request.stops, *stops], request.include_stop_str_in_output),
                    choices[-place] if place else None,
                    echo=echo,
                    is_scored=params.prompt_logprobs,
                    min_tokens=request.min_tokens,
                )
            )
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
