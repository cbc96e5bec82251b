"""A served model with its engine, tokenizer, chat template, limits and metrics. Independent of HTTP."""

import asyncio
import time
from bisect import bisect_left
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import cache, partial

import structlog

from nvium_core import Engine, EngineWorker, LoadedModel, sampling_defaults
from nvium_core.text.chat_template import ChatTemplate, Conversation, ConversationError
from nvium_core.text.detokenizer import longest_token
from nvium_core.text.sandbox import HELPERS
from server.admission import Admission, Drainable
from server.errors import CONTEXT_EXCEEDED, ApiError, InvalidField, Rejected, deadline_exceeded
from server.generation.choice import Prompt
from server.generation.reasoning_budget import Tags
from server.schemas.chat import ChatRequest
from server.schemas.formats import OutputFormat
from server.settings import Settings, read_file
from server.structured_outputs.constraints import Constraints, RequestConstraint
from server.telemetry.metrics import EngineMetrics, Metrics
from server.thread_pool import DaemonThreadPool

log = structlog.get_logger("nvium.server")

MAX_INLINE_CHARACTERS, MAX_INLINE_PROMPTS = 10_000, 16
"""If the prompts have more characters, or if there are more prompts, another thread tokenizes them."""

MAX_ALTERNATIVES = 200_000
"""Maximum number of alternative log-probabilities of a request. Each takes 150 bytes until it is written."""

STALL_SECONDS = 30  # maximum duration of a Step, unless `--stall-seconds` is given
TASK_SECONDS = 30  # maximum duration of a task in a worker thread; longer than a helper may take

MAX_TRIES = 4
"""Number of consecutive cuts to try if the template refuses one, such as for roles that do not alternate."""


class Service(Drainable):
    """The model behind all endpoints. Raises `InvalidRequest` for settings that do not fit the model."""

    def __init__(self, loaded: LoadedModel, settings: Settings, metrics: Metrics | None = None) -> None:
        self.settings = settings
        self.names = settings.served_model_name or (loaded.name,)
        self.name = self.names[0]
        if settings.chat_template:
            loaded.tokenizer.name_or_path = str(settings.chat_template)
            loaded.tokenizer.chat_template = read_file("chat_template", settings.chat_template)
        self.sampling_defaults = sampling_defaults(loaded.model, settings.generation_config)
        self.created = int(time.time())
        self.vocab_size = loaded.model.config.vocab_size
        self.num_layers, self.num_loops = loaded.model.config.num_hidden_layers, loaded.model.config.num_loops
        self.exit_layers = list(loaded.model.config.exit_layers or [])
        precision = loaded.precision()
        digest = loaded.digest()  # before the engine packs the weights and releases the pages of the file
        self.engine = Engine(loaded.model, settings.engine)
        self.precision = precision | {"cache": self.engine.runner.cache.precision}
        self.num_seats = self.engine.admission.num_seats
        self.metrics = metrics or Metrics(settings.latency_buckets)
        of_engine = EngineMetrics([depth / self.exit_layers[-1] for depth in self.exit_layers], self.metrics.registry)
        self.worker = EngineWorker(self.engine, observe=of_engine.observe)
        of_engine.worker = self.worker
        self.admission = Admission(self.num_seats + settings.max_queue)
        self.fingerprint = self._fingerprint(digest)
        model = {
            "model_name": self.name,
            "fingerprint": self.fingerprint,
            "device": loaded.model.device.type,
            "dtype": str(self.precision["arithmetic"]),
            "schedule": settings.schedule,
            "context": str(self.engine.context),
            "num_exits": str(len(self.exit_layers)),
        }
        self.metrics.add_model(model, self.num_seats)
        self._tokenize = loaded.tokenizer
        self.tokenizer = loaded.tokenizer.backend_tokenizer
        self.constraints = Constraints(loaded.tokenizer, self.engine.limits.end_token_ids)
        self.vocabulary = self.constraints.vocabulary
        self.chat_template = ChatTemplate(loaded.tokenizer)
        self.tags = Tags(self.vocabulary, self.vocab_size, self.chat_template.opening, self.chat_template.closing)
        self._longest_token = longest_token(self.tokenizer)
        self.text_threads = DaemonThreadPool(2, "nvium-text")
        """Threads that tokenize long texts, render templates and write long responses."""
        self.tokenizing_thread = DaemonThreadPool(1, "nvium-tokenize")
        """The thread of `/tokenize` and `/detokenize`, which may take seconds."""
        self._compiling_threads = DaemonThreadPool(4, "nvium-compile")
        """Threads that wait for grammar processes. Their number limits how many grammars are compiled at once."""
        self._pools = self.text_threads, self.tokenizing_thread, self._compiling_threads
        self._limited_at = 0.0

    def _fingerprint(self, digest: str) -> str:
        """Return an id of the weights, precision, schedule, CPU instructions and number of threads."""
        schedule, processor = self.settings.schedule, self.engine.runner.processor
        mode = f"{schedule}-deterministic" if self.settings.deterministic else schedule
        precision = dict.fromkeys(str(self.precision[name]) for name in ("arithmetic", "cache"))
        return "-".join(filter(None, (digest[:12], *precision, processor, mode)))

    def log_capacity(self) -> None:
        cache = self.engine.cache_size
        log.info(
            "serving",
            model=self.name,
            fingerprint=self.fingerprint,
            context=self.engine.context,
            max_sequences=self.num_seats,
            cache=str(cache),
            cache_bytes=cache.num_bytes,
            cache_pages=cache.num_pages,
        )
        if self.sampling_defaults:
            log.info("sampling defaults of the model; --generation-config off ignores them", **self.sampling_defaults)
        asked = self.settings.context or self.engine.runner.model.config.max_position_embeddings
        if self.engine.context < asked:
            log.warning("the KV cache limits the context", asked=asked, context=self.engine.context)

    def start(self) -> None:
        log.info("warming up")
        self.encode("Once")  # start the tokenizer's threads now: there may be no memory later
        started = time.monotonic()
        self.engine.warm_up()
        log.info("warm", seconds=round(time.monotonic() - started, 3), processor=self.engine.runner.processor)
        self.worker.start()

    def tick(self) -> None:
        if time.monotonic() > self._limited_at + 1:
            HELPERS.kill_stopped()
            HELPERS.limit_memory()
            self._limited_at = time.monotonic()

    def check_live(self) -> None:
        is_hung = self.worker.seconds_since_progress > (self.settings.stall_seconds or STALL_SECONDS)
        is_stuck = max(pool.busy_seconds for pool in self._pools) > TASK_SECONDS
        if is_hung or is_stuck or self.has_failed or not self.worker.is_alive:
            raise Rejected("not_live", "the device thread or a worker thread makes no progress")

    async def check_ready(self) -> None:
        if not self.worker.is_alive or self.admission.is_leaving:
            raise Rejected("not_ready", "the server is starting or shutting down")

    @property
    def has_failed(self) -> bool:
        return self.worker.has_failed

    def give_up(self) -> None:
        self.worker.stop(timeout=0)

    def checked_model(self, name: str | None) -> str:
        """Return the name if it is a served name. For None and `default`, return the first served name.

        Raise `ApiError` for an unknown name.
        """
        if name in self.names:
            return name
        if name not in (None, "default"):
            message = f"the model {name!r} does not exist; available: {', '.join(map(repr, self.names))}"
            raise ApiError(message, status=404, param="model", code="model_not_found")
        return self.name

    def max_tokens(
        self, asked: int | None, num_prompt_tokens: int, num_choices: int, num_alternatives: int | None
    ) -> int:
        """Return `max_tokens` for each choice. If no room remains, return 1, and the engine rejects the prompt."""
        per_choice = self.settings.max_new_tokens // num_choices
        if num_alternatives:
            per_choice = min(per_choice, MAX_ALTERNATIVES // (num_choices * num_alternatives))
        limit = max(1, min(self.engine.context - num_prompt_tokens, per_choice))
        if asked is None:
            return limit
        return min(asked, limit) if self.settings.clamp_max_tokens else asked

    def deadline(self, arrived: float) -> float | None:
        """Return the deadline of a request. The deadline and `arrived` are times by `time.monotonic()`."""
        seconds = self.settings.request_seconds
        return None if seconds is None else arrived + seconds

    @asynccontextmanager
    async def within_deadline(self, arrived: float) -> AsyncIterator[None]:
        """Raise `Rejected` if the context is still open at the deadline of a request."""
        try:
            async with asyncio.timeout_at(self.deadline(arrived)):
                yield
        except TimeoutError:
            raise deadline_exceeded() from None

    def check_length(self, param: str, text: str) -> None:
        """Raise `InvalidField` if the text is certainly too long for the context. Do not tokenize it."""
        if self._longest_token and len(text) > self.engine.context * self._longest_token:
            message = f"This model's maximum context length is {self.engine.context} tokens, and the text has more."
            raise InvalidField(param, message, code=CONTEXT_EXCEEDED)

    async def tokenize_prompts(self, prompts: Sequence[str | list[int]], *, adds_special_tokens: bool) -> list[Prompt]:
        for prompt in prompts:
            if isinstance(prompt, str):
                self.check_length("prompt", prompt)
        read = partial(self._read, prompts, adds_special_tokens=adds_special_tokens)
        if len(prompts) > MAX_INLINE_PROMPTS or sum(map(len, prompts)) > MAX_INLINE_CHARACTERS:
            return await self.text_threads.run(read)
        return read()

    def chat_prompt(
        self, chat: ChatRequest, check: Callable[[str], object] | None = None, *, truncates: bool
    ) -> list[int]:
        """Render a chat, call `check` with its text, and tokenize it."""
        render, conversation = partial(self.chat_template.prompt, check=check), chat.conversation()
        if not truncates:
            return render(conversation)
        return truncated(conversation, render, self.engine.context, chat.requested_max_tokens)

    def encode(self, text: str, *, adds_special_tokens: bool = True) -> list[int]:
        token_ids: list[int] = self._tokenize(text, add_special_tokens=adds_special_tokens, verbose=False).input_ids
        return token_ids

    async def constraint(self, output_format: OutputFormat | None) -> RequestConstraint:
        """Return the constraint of an answer's format. Raise `InvalidField` if the format is invalid."""
        if output_format is None:
            return RequestConstraint(None)
        compile_grammar = partial(self.constraints.compile, output_format.param, output_format.grammar)
        return await self._compiling_threads.run(compile_grammar)

    def _read(self, prompts: Sequence[str | list[int]], *, adds_special_tokens: bool) -> list[Prompt]:
        encode = partial(self.encode, adds_special_tokens=adds_special_tokens)
        return [Prompt(encode(each), each) if isinstance(each, str) else Prompt(each) for each in prompts]


def truncated(
    conversation: Conversation, render: Callable[[Conversation], list[int]], context: int, max_tokens: int | None
) -> list[int]:
    """Return the prompt without the fewest messages from the front, so that it and the answer fit the context.

    System messages at the beginning and the last message are kept, and tool results are dropped with their calls.
    `render` returns a prompt. It may raise `InvalidField` for one that is too long.
    """
    messages = conversation.messages
    first = next((n for n, message in enumerate(messages) if message["role"] not in ("system", "developer")), 0)
    cuts = [n for n in range(first, len(messages)) if messages[n]["role"] != "tool"] or [first]

    def without(cut: int) -> list[int]:
        return render(replace(conversation, messages=[*messages[:first], *messages[cut:]]))

    @cache
    def prompt(number: int) -> list[int]:
        """Return the prompt after cut `number`, or after the next one that the template accepts."""
        *others, last = cuts[number : number + MAX_TRIES]
        for cut in others:
            with suppress(ConversationError):
                return without(cut)
        return without(last)

    def fits(number: int, num_left: int) -> bool:
        with suppress(InvalidField):
            return len(prompt(number)) + num_left <= context
        return False

    if fits(0, max_tokens or 1):
        return prompt(0)
    num_left = max_tokens or context // 4  # by default, the answer has room for a quarter of the context
    return prompt(bisect_left(range(len(cuts) - 1), True, key=lambda number: fits(number, num_left)))
