"""Configuration of an engine, checked before anything is allocated."""

from dataclasses import dataclass
from typing import Annotated, NamedTuple

from typing_extensions import Doc

from nvium_core.choices import CachePrecision, Instructions, Sampling, Schedule
from nvium_core.engine.errors import require, require_between, require_choice, require_threshold

MAX_DRAFTS, MAX_SEQUENCES = 16, 65_536
DEFAULT_CACHE_MEMORY = {"cpu": "25%", "cuda": "85%"}
"""Upper bound on the key/value cache if neither its memory nor its tokens are configured. See device/memory.py."""


class Bounds(NamedTuple):
    """Maximum sequences, maximum rows per Step, and maximum prompt rows per Step while other sequences generate."""

    sequences: int
    step: int
    chunk: int


BOUNDS = {"cpu": Bounds(32, 256, 64), "cuda": Bounds(256, 8192, 2048)}


@dataclass(frozen=True, kw_only=True)
class ProcessorOptions:
    """How the CPU is used."""

    instructions: Annotated[Instructions, Doc("CPU vector instructions; auto is the widest supported.")] = "auto"
    threads: Annotated[str, Doc("CPU threads; auto is PyTorch's choice.")] = "auto"


@dataclass(frozen=True, kw_only=True)
class EngineConfig(ProcessorOptions):
    """Limits and policies of an engine. Each field is also an option of `nvium serve` (`nvium_core.options`).

    While other sequences generate, long runs (prompts) may have at most `chunk_rows` rows per Step. The key/value cache
    holds `cache_tokens` positions, or as many as fit into `cache_memory`. If neither is set, it holds the full context
    of `max_sequences` sequences, or as much of it as fits into `DEFAULT_CACHE_MEMORY`.
    """

    schedule: Annotated[Schedule, Doc("Schedule; race measures whole and sweep, and runs the faster.")] = "race"
    deterministic: Annotated[bool, Doc("Bit-identical answers, whatever other requests run.")] = False
    context: Annotated[int | None, Doc("Maximum tokens of prompt and answer together [the model's].")] = None
    max_sequences: Annotated[
        int | None, Doc("Maximum sequences that run at once; the rest wait [32; 256 on CUDA].")
    ] = None
    max_rows_per_step: Annotated[int | None, Doc("Maximum token positions per Step [256; 8192 on CUDA].")] = None
    chunk_rows: Annotated[
        int | None, Doc("Maximum prompt positions per Step while other sequences generate [64; 2048 on CUDA].")
    ] = None
    sampling: Annotated[
        Sampling | None, Doc("Distribution for requests that do not set nvium.sampling [the model's default].")
    ] = None
    exit_threshold: Annotated[
        float | None, Doc("With sampling threshold: cumulative probability at which a token leaves; 1: the last exit.")
    ] = None
    max_drafts: Annotated[
        int | None, Doc("Maximum tokens of a draft; 0 disables drafts [the fastest, as measured].")
    ] = None
    max_wait_steps: Annotated[int, Doc("After waiting this many Steps, a sequence is scheduled first.")] = 64
    cache_memory: Annotated[
        str | None,
        Doc("KV cache size, such as 2GiB or 10% of memory [as needed, at most 25% of the free memory; 85% on CUDA]."),
    ] = None
    cache_tokens: Annotated[int | None, Doc("KV cache size in tokens, instead of --cache-memory.")] = None
    cache_dtype: Annotated[CachePrecision, Doc("Precision of the cache's keys and values; auto is the model's.")] = (
        "auto"
    )
    page_size: Annotated[int | None, Doc("Tokens per cache page [16; 256 on CUDA].")] = None
    prefix_caching: Annotated[bool, Doc("Cache full pages for later prompts with the same prefix.")] = True

    def __post_init__(self) -> None:
        for name, literal in (("schedule", Schedule), ("instructions", Instructions), ("cache_dtype", CachePrecision)):
            require_choice(getattr(self, name), name, literal)
        thread_count(self.threads)
        if self.sampling is not None:
            require_choice(self.sampling, "sampling", Sampling)
        if self.exit_threshold is not None:
            require_threshold(self.exit_threshold, "exit_threshold")
        is_complete = self.sampling != "threshold" or self.exit_threshold is not None
        require(is_complete, "exit_threshold", "required by sampling 'threshold'")
        if self.max_drafts is not None:
            require_between(self.max_drafts, "max_drafts", 0, MAX_DRAFTS)
        for name in ("max_sequences", "max_rows_per_step", "chunk_rows", "max_wait_steps", "page_size", "cache_tokens"):
            value = getattr(self, name)
            require(value is None or value >= 1, name, f"must be at least 1, got {value}")
        most = self.max_sequences or 1
        require(most <= MAX_SEQUENCES, "max_sequences", f"must be at most {MAX_SEQUENCES}")
        both = self.cache_tokens is not None and self.cache_memory is not None
        require(not both, "cache_memory", "conflicts with cache_tokens; set only one of them")

    def bounds(self, device: str = "cpu") -> Bounds:
        default = BOUNDS.get(device, BOUNDS["cpu"])
        own = self.max_sequences, self.max_rows_per_step, self.chunk_rows
        return Bounds(*(given or known for given, known in zip(own, default, strict=True)))


def thread_count(text: str) -> int | None:
    """Parse the option `threads`. Return None for auto."""
    if text == "auto":
        return None
    require(text.isdecimal() and int(text) > 0, "threads", f"must be auto or a positive integer, got {text!r}")
    return int(text)
