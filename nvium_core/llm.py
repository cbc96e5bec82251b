"""Offline inference on text: a model, its tokenizer and an engine in one object."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

from nvium_core.choices import Device, FinishReason, GenerationDefaults, Precision, Weights
from nvium_core.engine.engine import Engine
from nvium_core.engine.events import Completion, TokenEvent, best
from nvium_core.engine.params import ContextLengthExceeded, EngineConfig, SamplingParams
from nvium_core.engine.sampling_defaults import sampling_defaults, with_defaults
from nvium_core.loading import LoadedModel, load_model
from nvium_core.text.answer import AnswerText
from nvium_core.text.chat_template import ChatTemplate
from nvium_core.text.detokenizer import Detokenizer, StopStrings

Message = dict[str, Any]
"""`{"role": "user", "content": "…"}`, as in OpenAI's API."""


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
        is_last = event.finish_reason is not None
        text = self.text.push(event.token_id, is_stop=event.is_stop, is_last=is_last)
        self.completion.text += text
        if self.text.has_stopped:
            self.completion.finish_reason = "stop"
        return Piece(text, [event.token_id], [event.exit], self.completion.finish_reason)


class LLM:
    """A model with its engine: `LLM("folder").generate("Once upon a time")`. Not thread-safe.

    model: a folder, Hub name or GGUF file; None is the bundled model.
    exits: folder or Hub name of retrofitted exits for the model.
    generation_config: auto takes defaults from the model's generation_config.json or GGUF file, for parameters that a
        call leaves out; off takes those of `SamplingParams`.
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
        **engine_options: Any,
    ) -> None:
        if not isinstance(model, LoadedModel):
            model = load_model(model, device, dtype, weights=weights, exits=exits)
        self.loaded = model
        self.sampling_defaults = sampling_defaults(self.loaded.model, generation_config)
        self.engine = Engine(self.loaded.model, EngineConfig(**engine_options))
        self._template = ChatTemplate(self.loaded.tokenizer)
        self._num_requests = 0

    def generate(self, prompts: str | Sequence[str], **sampling: Any) -> Completions:
        """Continue one text or several. With `n`, the result has `n` consecutive completions for each prompt."""
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        return self._complete([self._tokens(text) for text in texts], **sampling)

    def chat(self, messages: Sequence[Message], **sampling: Any) -> Completions:
        """Answer a conversation through the model's chat template. `max_tokens` defaults to the rest of the context."""
        prompt = self._template.token_ids(messages, ())
        return self._complete([prompt], **self._chat_sampling(prompt, sampling))

    def stream(self, prompt: str | Sequence[Message], **sampling: Any) -> Generator[Piece, None, None]:
        """Stream the answer to a text or a conversation token by token. Closing the stream cancels the request."""
        if isinstance(prompt, str):
            tokens = self._tokens(prompt)
        else:
            tokens = self._template.token_ids(prompt, ())
            sampling = self._chat_sampling(tokens, sampling)
        params, answers = self._begin([tokens], **sampling)
        if params.num_choices > 1:
            self._cancel(answers)
            raise ValueError("n and best_of must be 1 when streaming")
        return self._streamed(answers)

    def _tokens(self, text: str) -> list[int]:
        token_ids: list[int] = self.loaded.tokenizer(text, verbose=False).input_ids
        return token_ids

    def _chat_sampling(self, prompt: Sequence[int], sampling: dict[str, Any]) -> dict[str, Any]:
        """Add the chat template's stop strings and stop tokens. Set `max_tokens` to its default if it is missing."""
        room = self.engine.context - len(prompt)
        if room < 1:
            raise ContextLengthExceeded(len(prompt), 1, self.engine.context)
        ends = (*sampling.get("stop_token_ids", ()), *self._template.stop_token_ids)
        stops = (*as_strings(sampling.get("stop", ())), *self._template.stops)
        return {"max_tokens": room, **sampling, "stop_token_ids": ends, "stop": stops}

    def _complete(self, prompts: Sequence[Sequence[int]], **sampling: Any) -> Completions:
        params, answers = self._begin(prompts, **sampling)
        for _ in self._streamed(answers):
            pass
        ranked = Completions()
        for choices in answers.values():
            completions = [answer.completion for answer in choices]
            ranked += best(completions, params.n, lambda completion: completion.mean_logprob)
        return ranked

    def _streamed(self, answers: dict[str, list[_Answer]]) -> Generator[Piece, None, None]:
        """Run until all answers are complete. Cancel them if the caller stops."""
        try:
            for event in self.engine.run():
                if isinstance(event, TokenEvent):
                    answer = answers[event.request_id][event.choice]
                    piece = answer.append(event)
                    if answer.text.has_stopped:
                        self.engine.cancel(event.request_id, event.choice)
                    yield piece
        finally:
            self._cancel(answers)

    def _begin(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        stop: str | Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        **sampling: Any,
    ) -> tuple[SamplingParams, dict[str, list[_Answer]]]:
        params, stops = SamplingParams(**with_defaults(sampling, self.sampling_defaults)), as_strings(stop)
        tokenizer = self.loaded.tokenizer.backend_tokenizer
        answers: dict[str, list[_Answer]] = {}
        try:
            for prompt in prompts:
                name = f"llm-{self._num_requests}"
                self._num_requests += 1
                self.engine.add(name, prompt, params)
                for _ in range(params.num_choices):
                    text = AnswerText(Detokenizer(tokenizer, prompt), StopStrings(stops, include_stop_str_in_output))
                    answers.setdefault(name, []).append(_Answer(text))
        except BaseException:
            self._cancel(answers)
            raise
        return params, answers

    def _cancel(self, answers: dict[str, list[_Answer]]) -> None:
        for name in answers:
            self.engine.cancel(name)


def as_strings(stop: str | Sequence[str]) -> tuple[str, ...]:
    return (stop,) if isinstance(stop, str) else tuple(stop)
