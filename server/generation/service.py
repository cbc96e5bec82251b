"""One served model: its engine, tokenizer, templates, limits and metrics. Knows no HTTP."""

import asyncio
import hashlib
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import structlog

from nvium_core import (
    SUGGESTED,
    Engine,
    EngineWorker,
    InvalidRequest,
    LoadedModel,
)
from nvium_core.text.chat_template import ChatTemplate, Conversation
from nvium_core.text.token_bytes import TokenBytes, longest_token
from server.errors import EngineGone, InvalidField, ModelNotFound
from server.generation.aside import Aside
from server.generation.choice_text import Prompt
from server.generation.constraints import AllowedTokens, Constraints, RequestConstraint
from server.http.admission import Admission, draining
from server.schemas.formats import Form
from server.schemas.generation import RequestLimits
from server.schemas.models import Model
from server.schemas.tokens import TokenizerInfo
from server.settings import Settings, SettingsError
from server.telemetry.metrics import Metrics

Result = TypeVar("Result")

log = structlog.get_logger("nvium.server")

ALIAS = "default"
MAX_ALTERNATIVES = 2_000_000
"""Log-probabilities of other tokens in one answer, at some 200 bytes each."""

MAX_INLINE_CHARACTERS, MAX_INLINE_PROMPTS = 10_000, 16
"""Longer or more texts are tokenized off the event loop."""

NUM_ASIDE_THREADS = 2
"""Threads that tokenize long texts and render templates for generating requests."""

NUM_COMPILING_THREADS = 16
"""Threads that wait for processes which compile grammars."""

PAUSE_SECONDS = 1
"""Seconds without a tick after which the process counts as having been suspended."""

FINGERPRINT_SAMPLES = 64


class Service:
    """Raises `InvalidRequest` for settings that the model cannot be run with."""

    def __init__(self, loaded: LoadedModel, settings: Settings) -> None:
        self.settings = settings
        self.names = settings.served_model_name or (loaded.name,)
        self.name = self.names[0]
        if settings.chat_template:
            loaded.tokenizer.chat_template = read_template(settings.chat_template)
        self.created = int(time.time())
        self.num_layers = loaded.model.config.num_hidden_layers
        self.vocab_size = loaded.model.config.vocab_size
        self.exit_layers = list(loaded.model.config.exit_layers or [])
        self.engine = Engine(loaded.model, settings.engine)
        self.metrics = Metrics([depth / self.num_layers for depth in self.exit_layers], settings.latency_buckets)
        self.worker = EngineWorker(self.engine, observe=self.metrics.steps.observe)
        self.metrics.watch(lambda: self.worker.state, lambda: self.worker.seconds_since_progress)
        self.admission = Admission(settings.max_sequences + settings.max_queue)
        self.fingerprint = fingerprint(loaded, settings, self.engine)
        self.metrics.introduce(self._about(loaded), settings.max_sequences)
        self._tokenize = loaded.tokenizer
        self.tokenizer = loaded.tokenizer.backend_tokenizer
        self.constraints = Constraints(loaded.tokenizer, self.engine.end_token_ids)
        self.vocabulary = TokenBytes(self.constraints.token_bytes)
        self.chat_template = ChatTemplate(loaded.tokenizer)
        self.tokenizer_info = tokenizer_info(loaded, self.engine.context)
        self._longest_token = longest_token(self.tokenizer)
        self.limits = RequestLimits(**{name: getattr(settings, name) for name in RequestLimits.model_fields})
        self._aside = Aside(NUM_ASIDE_THREADS, "nvium-aside")
        self._tokenizing = Aside(1, "nvium-tokenize")
        self._compiling = Aside(NUM_COMPILING_THREADS, "nvium-compile")
        self.is_warm = False
        self._ticked: float | None = None

    def introduce(self) -> None:
        """Log what is served and what its cache takes."""
        cache = self.engine.cache_size
        log.info(
            "serving",
            model=self.name,
            fingerprint=self.fingerprint,
            context=self.engine.context,
            max_sequences=self.settings.max_sequences,
            cache=str(cache),
            cache_bytes=cache.num_bytes,
            cache_pages=cache.num_pages,
        )
        if cache.num_tokens < self.engine.context:
            log.warning("the cache is smaller than the context; longer requests are refused", tokens=cache.num_tokens)

    def _about(self, loaded: LoadedModel) -> dict[str, str]:
        return {
            "model_name": self.name,
            "fingerprint": self.fingerprint,
            "device": loaded.model.device.type,
            "dtype": str(loaded.model.dtype).removeprefix("torch."),
            "schedule": self.settings.schedule,
            "context": str(self.engine.context),
            "num_exits": str(len(self.exit_layers)),
        }

    def warm_up(self) -> None:
        """Generate for a moment before the first request, which also begins the race of schedules."""
        log.info("warming up")
        self.encode("Once")  # starts the tokenizer's threads, which without memory fails for good
        started = time.monotonic()
        self.engine.warm_up(remembers=True)
        log.info("warm", seconds=round(time.monotonic() - started, 3), processor=self.engine.runner.processor)
        self.is_warm = True

    @property
    def is_live(self) -> bool:
        """Whether the engine and other threads' work make progress, or the process was suspended until just now."""
        seconds = (self.worker.seconds_since_progress, self._aside.seconds, self._tokenizing.seconds)
        has_progressed = max(seconds) < self.settings.stall_seconds
        return self.worker.is_alive and not self.has_failed and (has_progressed or self._has_paused)

    @property
    def _has_paused(self) -> bool:
        """Whether the process has just been suspended."""
        return self._ticked is not None and time.monotonic() - self._ticked > PAUSE_SECONDS

    def tick(self) -> None:
        """Called ten times a second by the event loop, which stands still while the process is suspended."""
        if self._has_paused:
            for each in (self.worker, self._aside, self._tokenizing):
                each.excuse()
        self._ticked = time.monotonic()

    @property
    def is_ready(self) -> bool:
        return self.is_warm and self.worker.is_alive and not self.admission.is_draining

    @property
    def has_failed(self) -> bool:
        """Whether the engine has failed; nothing can be answered any more."""
        return self.worker.has_failed

    def give_up(self) -> None:
        """Stop the engine at once; running requests fail."""
        self.worker.stop(timeout=0)

    def check_accepting(self) -> None:
        """Raise `Overloaded` if the server drains or its engine has stopped."""
        if self.admission.is_draining:
            raise draining()
        if not self.worker.is_alive:
            raise EngineGone

    def check_model(self, name: str) -> str:
        """The served name for a requested one. Raises `ModelNotFound`."""
        if name not in (*self.names, ALIAS):
            raise ModelNotFound(name, self.names)
        return name if name in self.names else self.name

    def check_new_tokens(self, num_tokens: int) -> None:
        """Raise `InvalidRequest` for too many tokens over all choices."""
        allowed = self.limits.max_new_tokens
        message = f"prompts × choices × max_tokens is {num_tokens}, more than the {allowed} allowed"
        if num_tokens > allowed:
            raise InvalidRequest("max_tokens", message)

    def check_scored_tokens(self, num_tokens: int) -> None:
        """Raise `InvalidRequest` for too many prompt tokens to score."""
        allowed = self.limits.max_new_tokens
        if num_tokens > allowed:
            raise InvalidRequest("prompt", f"{num_tokens} tokens are to be scored, more than the {allowed} allowed")

    def check_alternatives(self, num_alternatives: int) -> None:
        """Raise `InvalidRequest` for too many log-probabilities of other tokens."""
        message = f"{num_alternatives} alternatives (tokens × each) are more than the {MAX_ALTERNATIVES} allowed"
        if num_alternatives > MAX_ALTERNATIVES:
            raise InvalidRequest("logprobs", message)

    def max_tokens(self, asked: int | None, num_prompt_tokens: int, num_choices: int) -> int:
        """Tokens of each choice: at least one, so that a full context is refused."""
        of_context = self.engine.context - num_prompt_tokens
        room = max(1, min(of_context, self.limits.max_new_tokens // num_choices))
        if asked is None:
            return room
        return min(asked, room) if self.settings.clamp_max_tokens else asked

    def deadline(self, arrived: float) -> float | None:
        """Deadline of a request that arrived at `arrived`, both by `time.monotonic()`."""
        seconds = self.settings.request_seconds
        return None if seconds is None else arrived + seconds

    def check_length(self, param: str, text: str) -> None:
        """Raise `InvalidField` for a text that is too long for the context, without tokenizing it."""
        if self._longest_token and len(text) > self.engine.context * self._longest_token:
            message = f"This model's maximum context length is {self.engine.context} tokens, and the text has more."
            raise InvalidField(param, message, code="context_length_exceeded")

    async def read_prompts(self, prompts: Sequence[str | list[int]], last: int | None = None) -> list[Prompt]:
        """Tokenize prompts that are text, and keep the `last` tokens of each."""
        read = await self._read_whole(prompts)
        return read if last is None else [prompt.truncated(last) for prompt in read]

    async def _read_whole(self, prompts: Sequence[str | list[int]]) -> list[Prompt]:
        for prompt in prompts:
            if isinstance(prompt, str):
                self.check_length("prompt", prompt)
        if len(prompts) > MAX_INLINE_PROMPTS or sum(map(len, prompts)) > MAX_INLINE_CHARACTERS:
            return await self.aside(self._read, prompts)
        return self._read(prompts)

    async def read_messages(self, conversation: Conversation, last: int | None = None) -> Prompt:
        """The prompt that the chat template makes of a conversation, or its `last` tokens."""
        check = partial(self.check_length, "messages")
        prompt = Prompt(await self.aside(partial(self.chat_template.prompt, conversation, check=check)))
        return prompt if last is None else prompt.truncated(last)

    def encode(self, text: str, *, adds_special_tokens: bool = True) -> list[int]:
        """The tokens of a text, after the tokenizer's leading special tokens."""
        token_ids: list[int] = self._tokenize(text, add_special_tokens=adds_special_tokens).input_ids
        return token_ids

    async def constraint(
        self, form: Form | None, allowed: Sequence[int] | None = None, begun: str = ""
    ) -> RequestConstraint:
        """The constraint of the tokens allowed and of an answer's form, for an answer that may have `begun`. Raises
        `InvalidField`."""
        compiled = RequestConstraint(None)
        if form is not None:
            compile_form = partial(self.constraints.compile, form.param, form.grammar, begun)
            compiled = await asyncio.get_running_loop().run_in_executor(self._compiling, compile_form)
        if allowed is None:
            return compiled
        return compiled._replace(constraint=AllowedTokens.of(allowed, self.vocab_size, compiled.constraint))

    async def aside(self, work: Callable[..., Result], *given: Any) -> Result:
        """Run `work` on one of a few threads, so that a flood of it leaves time for the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._aside, partial(work, *given))

    async def aside_alone(self, work: Callable[[], Result]) -> Result:
        """The same on a single thread, for work that may take seconds and needs no generation."""
        return await asyncio.get_running_loop().run_in_executor(self._tokenizing, work)

    def card(self, name: str) -> Model:
        """The model's entry in the list of models, by one of its names."""
        names = (*RequestLimits.model_fields, "max_queue", "max_body_bytes")
        return Model(
            id=name,
            created=self.created,
            max_model_len=self.engine.context,
            limits={name: getattr(self.settings, name) for name in names},
            nvium={"exit_layers": self.exit_layers, "num_layers": self.num_layers, "suggested": SUGGESTED},
        )

    def _read(self, prompts: Sequence[str | list[int]]) -> list[Prompt]:
        return [Prompt(self.encode(p), p) if isinstance(p, str) else Prompt(p) for p in prompts]


def tokenizer_info(loaded: LoadedModel, context: int) -> TokenizerInfo:
    tokenizer = loaded.tokenizer
    return TokenizerInfo(
        tokenizer_class=type(tokenizer).__name__,
        vocab_size=len(tokenizer),
        model_max_length=context,
        special_tokens=dict(tokenizer.special_tokens_map),
        chat_template=tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else None,
    )


def read_template(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SettingsError(f"chat_template: cannot read {file}: {reason}") from error


def fingerprint(loaded: LoadedModel, settings: Settings, engine: Engine) -> str:
    """Identifies weights (by samples of every tensor), precision, a CPU's instructions and threads, and schedule."""
    digest = hashlib.sha256()
    for name, tensor in sorted(loaded.model.state_dict().items()):
        digest.update(f"{name} {list(tensor.shape)} {sample(tensor)}".encode())
    dtype = str(loaded.model.dtype).removeprefix("torch.")
    mode = f"{settings.schedule}-deterministic" if settings.deterministic else settings.schedule
    parts = digest.hexdigest()[:12], dtype, engine.runner.processor, mode
    return "-".join(part for part in parts if part)


def sample(tensor: Any) -> list[float]:
    """Evenly spread elements of a tensor."""
    values: list[float] = tensor.flatten()[:: max(1, tensor.numel() // FINGERPRINT_SAMPLES)].tolist()
    return values
