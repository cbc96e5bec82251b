"""Offline inference on text: a model, its tokenizer and an engine in one object."""

from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

from nvium_core.choices import Device, FinishReason, GenerationDefaults, Precision, Weights
from nvium_core.engine.config import EngineConfig
from nvium_core.engine.engine import Engine
from nvium_core.engine.errors import ContextLengthExceeded, EngineError, InvalidRequest, require, require_choice
from nvium_core.engine.events import Completion, Event, FailureEvent, PromptEvent, TokenEvent, best
from nvium_core.engine.limits import sampling_defaults, with_defaults
from nvium_core.engine.sampling_params import SamplingParams
from nvium_core.loading import LoadedModel, load_model
from nvium_core.text.chat_template import ChatTemplate
from nvium_core.text.detokenizer import AnswerText, Detokenizer, StopStrings

Message = dict[str, Any]
"""`{"role": "user", "content": "…"}`, as in OpenAI's API."""

ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass
class TextCompletion(Completion):
    """A completion with its text. Only `text` excludes end-of-text and stop strings; `token_ids` includes both."""

    text: str = ""


class Completions(list[TextCompletion]):
    """The completions of all prompts, in order. If there is only one, the properties return its fields."""

    @property
    def only(self) -> TextCompletion:
        """The single completion. Raise `ValueError` if there are several."""
        [completion] = self
        return completion

    @property
    def text(self) -> str:
        return self.only.text

    @property
    def token_ids(self) -> list[int]:
        return self.only.token_ids

    @property
    def exits(self) -> list[int]:
        return self.only.exits

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.only.finish_reason


@dataclass(frozen=True)
class Piece:
    """A streamed token, and the text that the token completes. The text may be empty. `exits` count from 1."""

    text: str
    token_ids: list[int] = field(default_factory=list)
    exits: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None


@dataclass
class _Answer:
    """One choice of a running prompt."""

    text: AnswerText
    completion: TextCompletion = field(default_factory=TextCompletion)

    def append(self, event: TokenEvent) -> Piece:
        self.completion.append(event)
        text = self.text.push(event.token_id, is_stop=event.is_stop, finish_reason=event.finish_reason)
        self.completion.text += text
        self.completion.finish_reason = self.text.finish_reason
        return Piece(text, [event.token_id], [event.exit], self.completion.finish_reason)


@dataclass
class _Request:
    """A prompt with its choices. `pieces` have not been streamed yet."""

    name: str
    token_ids: list[int]
    params: SamplingParams
    answers: list[_Answer]
    pieces: deque[Piece] = field(default_factory=deque)
    error: EngineError | None = None

    @property
    def is_done(self) -> bool:
        return all(answer.completion.finish_reason for answer in self.answers)

    def taken(self) -> Iterator[Piece]:
        """Yield the waiting pieces. Then raise the error if the request has failed."""
        while self.pieces:
            yield self.pieces.popleft()
        if self.error:
            raise self.error


class LLM:
    """A model with its engine: `LLM("folder").generate("Once upon a time")`. Several streams may be open; not
    thread-safe.

    model: a folder, Hub name or GGUF file; None is the bundled model.
    exits: folder or Hub name of retrofitted exits for the model.
    generation_config: auto takes defaults from the model's generation_config.json or GGUF file, for parameters that a
        call leaves out; off takes those of `SamplingParams`.
    threshold: default `threshold` of calls with the sampling "threshold".
    engine_options: fields of `EngineConfig`.

    The methods take these keywords as `sampling`: the fields of `SamplingParams`, `stop` (a string or several) and
    `include_stop_str_in_output`. Raise `CheckpointError` if loading fails, or `InvalidRequest` for invalid values.
    """

    def __init__(
        self,
        model: str | LoadedModel | None = None,
        *,
        exits: str | None = None,
        device: Device = "auto",
        dtype: Precision = "auto",
        weights: Weights = "auto",
        generation_config: GenerationDefaults = "auto",
        threshold: float | None = None,
        **engine_options: Any,
    ) -> None:
        choices = ("device", device, Device), ("dtype", dtype, Precision), ("weights", weights, Weights)
        for name, value, literal in (*choices, ("generation_config", generation_config, GenerationDefaults)):
            require_choice(value, name, literal)
        if not isinstance(model, LoadedModel):
            model = load_model(model, device, dtype, weights=weights, exits=exits)
        self.loaded = model
        self.sampling_defaults = sampling_defaults(self.loaded.model, generation_config)
        self.engine = Engine(self.loaded.model, EngineConfig(**{"exit_threshold": threshold} | engine_options))
        self._template = ChatTemplate(self.loaded.tokenizer)
        self._num_requests = 0
        self._running: dict[str, _Request] = {}

    def generate(self, prompts: str | Sequence[str], **sampling: Any) -> Completions:
        """Continue one text or several. With `n`, the result has `n` consecutive completions for each prompt."""
        return self._complete([self._tokens(text) for text in as_tuple(prompts, "prompts")], **sampling)

    def chat(self, messages: Sequence[Message], **sampling: Any) -> Completions:
        """Answer a conversation through the model's chat template. `max_tokens` defaults to the rest of the context."""
        prompt = self._conversation(messages)
        return self._complete([prompt], **self._chat_sampling(prompt, sampling))

    def stream(self, prompt: str | Sequence[Message], **sampling: Any) -> Generator[Piece, None, None]:
        """Stream the answer to a text or a conversation token by token. Closing the stream cancels the request."""
        if isinstance(prompt, str):
            tokens = self._tokens(prompt)
        else:
            tokens = self._conversation(prompt)
            sampling = self._chat_sampling(tokens, sampling)
        params, stops = self._params(**sampling)
        if params.num_choices > 1:
            raise ValueError("n and best_of must be 1 when streaming")
        return self._streamed([self._request(tokens, params, stops)])

    def _conversation(self, messages: Sequence[Any]) -> list[int]:
        messages = as_tuple(messages, "messages")
        require(len(messages) > 0, "messages", "must have at least one message")
        are_messages = all(isinstance(message, dict) and message.get("role") in ROLES for message in messages)
        require(are_messages, "messages", f"must be messages with a role: {', '.join(ROLES)}")
        return self._template.token_ids([{**message, "content": content_of(message)} for message in messages], ())

    def _tokens(self, text: Any) -> list[int]:
        require(isinstance(text, str), "prompts", f"must be texts, got {type(text).__name__}")
        try:
            token_ids: list[int] = self.loaded.tokenizer(text, verbose=False).input_ids
        except TypeError as error:  # the tokenizer cannot read lone surrogates
            raise InvalidRequest("prompts", "must be valid Unicode") from error
        return token_ids

    def _chat_sampling(self, prompt: Sequence[int], sampling: dict[str, Any]) -> dict[str, Any]:
        """Add the chat template's stop strings and stop tokens. Set `max_tokens` to its default if it is missing."""
        room = self.engine.context - len(prompt)
        if room < 1:
            raise ContextLengthExceeded(len(prompt), 1, self.engine.context)
        ends, stops = self._template.ends(ignore_eos=sampling.get("ignore_eos", False))
        added = {"stop_token_ids": ends, "stop": stops}
        given = {name: (*as_tuple(sampling.get(name, ()), name), *more) for name, more in added.items()}
        return {"max_tokens": room, **sampling, **given}

    def _complete(self, prompts: Sequence[list[int]], **sampling: Any) -> Completions:
        params, stops = self._params(**sampling)
        requests = [self._request(prompt, params, stops) for prompt in prompts]
        for _ in self._streamed(requests):
            pass
        ranked = Completions()
        for request in requests:
            completions = [answer.completion for answer in request.answers]
            ranked += best(completions, params.n, attrgetter("scores"))
        return ranked

    def _params(
        self, *, stop: str | Sequence[str] = (), include_stop_str_in_output: bool = False, **sampling: Any
    ) -> tuple[SamplingParams, StopStrings]:
        stops = as_tuple(stop, "stop")
        are_texts = all(isinstance(each, str) and each for each in stops)
        require(are_texts, "stop", "must be a string that is not empty, or several")
        params = SamplingParams(**with_defaults(sampling, self.sampling_defaults))
        return params, StopStrings(stops, include_stop_str_in_output)

    def _request(self, prompt: list[int], params: SamplingParams, stops: StopStrings) -> _Request:
        self.engine.limits.check(prompt, params)
        self._num_requests += 1
        tokenizer = self.loaded.tokenizer.backend_tokenizer
        answers = [
            _Answer(AnswerText(Detokenizer(tokenizer, prompt), replace(stops), params.min_tokens))
            for _ in range(params.num_choices)
        ]
        return _Request(f"llm-{self._num_requests}", prompt, params, answers)

    def _streamed(self, requests: Sequence[_Request]) -> Generator[Piece, None, None]:
        """Start the requests and run until they are complete. Cancel them if the caller stops.

        Pieces of other requests, whose streams are open too, wait until their streams are read.
        """
        try:
            for request in requests:
                self.engine.add(request.name, request.token_ids, request.params)
                self._running[request.name] = request
            while True:
                for request in requests:
                    yield from request.taken()
                if all(request.is_done for request in requests) or not self.engine.has_work:
                    return
                for event in self.engine.step():
                    if event.request_id in self._running:
                        self._receive(event, self._running[event.request_id])
        finally:
            for request in requests:
                self.engine.cancel(request.name)
                self._running.pop(request.name, None)

    def _receive(self, event: Event, request: _Request) -> None:
        answer = request.answers[event.choice - request.params.choice]
        if isinstance(event, FailureEvent):
            request.error = event.error
        elif isinstance(event, PromptEvent):
            answer.completion.append(event)
        elif not answer.text.finish_reason:
            request.pieces.append(piece := answer.append(event))
            if piece.finish_reason:
                self.engine.cancel(request.name, event.choice)


def as_tuple(given: Any, name: str) -> tuple[Any, ...]:
    """Return the items of a list, or a text alone."""
    require(isinstance(given, Iterable), name, f"must be a list, got {given!r}")
    return (given,) if isinstance(given, str) else tuple(given)


def content_of(message: Message) -> str:
    """Return a message's text. Parts, which are texts or refusals, are joined by newlines."""
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"text": "" if content is None else content}]
    texts: list[Any] = [part.get("text", part.get("refusal")) if isinstance(part, dict) else None for part in parts]
    are_texts = all(isinstance(text, str) for text in texts)
    require(are_texts, "messages", "content must be a text or a list of text parts")
    return "\n".join(texts)
