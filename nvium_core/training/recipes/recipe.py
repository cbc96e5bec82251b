"""A recipe: everything a training run depends on besides its text. Knows nothing of any particular recipe."""

from dataclasses import dataclass, field, replace
from typing import Literal

from nvium_core.errors import NviumError
from nvium_core.model.config import NviumConfig, even_exit_layers
from nvium_core.training.data.documents import Diet
from nvium_core.training.objective.beta import BetaSettings
from nvium_core.training.optimizer import OptimizerSettings
from nvium_core.training.schedule import LearningRate, RouterWarmup

MIN_TRAINED_VOCABULARY = 257  # every byte, and end-of-text
MAX_TRAINED_VOCABULARY = 2**16  # token files hold 16 bits a token

Text = Literal["documents", "conversations"]
"""Documents, all of whose tokens count in the loss, or conversations, whose answers count."""


class RecipeError(NviumError, ValueError):
    """An unknown recipe, or a setting it does not have; the message names it."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The model's shape; the tokenizer determines the vocabulary.

    Exits are even, or after `exit_layers`. `router_width` and `adapter_width` are inner widths: None is the paper's
    ⌊0.66 d⌋ and d; 0 is no adapter. `num_kv_heads` None is one for each head.
    """

    num_layers: int
    width: int
    mlp_width: int
    num_heads: int
    num_exits: int
    vocab_size: int
    context: int
    exit_layers: tuple[int, ...] = ()
    num_kv_heads: int | None = None
    router_width: int | None = None
    adapter_width: int | None = None
    tied_head: bool = False

    def __post_init__(self) -> None:
        counts = ("num_layers", "width", "mlp_width", "num_heads", "num_exits", "vocab_size", "context")
        for name in counts:
            check(getattr(self, name) >= 1, f"{name} must be at least 1")

    @property
    def exit_depths(self) -> list[int]:
        """l_1 … l_N. Raises `ValueError` for impossible exits."""
        if not self.exit_layers:
            return even_exit_layers(self.num_layers, self.num_exits)
        placed = len(self.exit_layers)
        check(placed == self.num_exits, f"exit_layers places {placed} exits, and num_exits is {self.num_exits}")
        return list(self.exit_layers)

    def config(self, vocab_size: int, end_token: int) -> NviumConfig:
        """The N-vium of this shape."""
        return NviumConfig(
            vocab_size=vocab_size,
            hidden_size=self.width,
            intermediate_size=self.mlp_width,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            max_position_embeddings=self.context,
            exit_layers=self.exit_depths,
            router_hidden_size=self.router_width,
            adapter_hidden_size=self.adapter_width,
            tie_word_embeddings=self.tied_head,
            bos_token_id=end_token,
            eos_token_id=end_token,
        )


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything a training run depends on besides its text.

    `evaluations`: how often the validation text is evaluated, evenly spaced, the last time at the end. `initial`:
    folder or Hub name of the model to start from, None for random weights. `tokenizer`: name of a tokenizer; None is
    the initial model's or, without one, a byte-level BPE of `shape.vocab_size` tokens trained on the text. `epochs`
    above 0 is how often the text is read, and determines `total_tokens` when the run starts. `packing` puts several
    conversations into a window; otherwise each has its own. Without `answers_only` all tokens of a conversation count.
    """

    shape: ModelShape
    initial: str | None = None
    tokenizer: str | None = None
    text: Text = "documents"
    total_tokens: int
    epochs: float = 0.0
    packing: bool = True
    answers_only: bool = True
    tokens_per_step: int
    short_context: int
    long_context_share: float = 0.0
    learning_rate: LearningRate
    router_warmup: RouterWarmup = field(default_factory=RouterWarmup)
    beta: BetaSettings
    diet: Diet = field(default_factory=Diet)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    seed: int = 0
    checkpoint_every: int = 200
    evaluations: int = 1
    validation_tokens: int = 200_000

    def __post_init__(self) -> None:
        for name in ("total_tokens", "tokens_per_step", "short_context", "checkpoint_every"):
            check(getattr(self, name) >= 1, f"{name} must be at least 1")
        for name in ("evaluations", "seed", "epochs"):
            check(getattr(self, name) >= 0, f"{name} must not be negative")
        check(self.validation_tokens >= 1, "validation_tokens must be at least 1")
        check(0 <= self.long_context_share <= 1, "long_context_share must be between 0 and 1")
        trains_tokenizer = self.tokenizer is None and self.initial is None
        fits = not trains_tokenizer or MIN_TRAINED_VOCABULARY <= self.shape.vocab_size <= MAX_TRAINED_VOCABULARY
        check(fits, f"vocab_size must be from {MIN_TRAINED_VOCABULARY} to {MAX_TRAINED_VOCABULARY}")

    def check_together(self) -> None:
        """Raise `ValueError` for contradictory values."""
        contexts = {self.short_context, self.shape.context}
        check(self.short_context <= self.shape.context, "short_context must be at most shape.context")
        whole = all(self.tokens_per_step % context == 0 for context in contexts)
        check(whole, f"tokens_per_step must be a multiple of {' and '.join(map(str, sorted(contexts)))}, the windows")
        seen = self.evaluations > 0 or not self.beta.adaptive
        check(seen, "evaluations must be at least 1 for an adaptive β")

    def reading(self, windows_per_epoch: int) -> "Recipe":
        """The recipe with `total_tokens` for its epochs of a text of `windows_per_epoch` short windows."""
        if not self.epochs:
            return self
        return replace(self, total_tokens=max(1, round(self.epochs * windows_per_epoch * self.short_context)))

    @property
    def num_steps(self) -> int:
        return max(1, self.total_tokens // self.tokens_per_step)

    def context_at(self, progress: float) -> int:
        """Windows are short at first, where attention is cheaper, and of full length in the last share of the run."""
        return self.shape.context if progress >= 1 - self.long_context_share else self.short_context

    def windows_of_a_step(self, progress: float) -> int:
        return max(1, self.tokens_per_step // self.context_at(progress))

    @property
    def longest_window(self) -> int:
        return self.context_at((self.num_steps - 1) / self.num_steps)


def swiglu_width(width: int) -> int:
    """The customary inner width, 8/3 of the width, in whole multiples of 8."""
    return 8 * -(-width // 3)


def check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
