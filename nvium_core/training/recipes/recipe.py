"""The configuration of a training run, and of its dense twin.

A dense twin is a plain Llama with the same depth, width, number of parameters and data as a recipe's model.
"""

import re
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Literal

from nvium_core.errors import NviumError
from nvium_core.model.config import NviumConfig, even_exit_layers
from nvium_core.model.nvium import Nvium
from nvium_core.training.optimizer import BetaSettings, LearningRate, OptimizerSettings, RouterWarmup

MIN_TRAINED_VOCABULARY = 257  # every byte, and end-of-text
MAX_TRAINED_VOCABULARY = 2**16  # token files store a token in 16 bits

TextKind = Literal["documents", "conversations"]
"""In documents, all tokens count in the loss. In conversations, only the answers count."""


class RecipeError(NviumError, ValueError):
    """A recipe is unknown, or a setting is invalid."""


CONFIG_FIELDS = {
    "num_layers": "num_hidden_layers",
    "loops": "num_loops",
    "width": "hidden_size",
    "mlp_width": "intermediate_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "context": "max_position_embeddings",
    "router_width": "router_hidden_size",
    "adapter_width": "adapter_hidden_size",
    "tied_head": "tie_word_embeddings",
}
"""Fields of `ModelShape` → fields of `NviumConfig` with the same value."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The model's shape. If a tokenizer is trained on the text, `vocab_size` is the tokenizer's size.

    A token passes the layers `loops` times, so its depth is `num_layers` · `loops`. Exits are evenly spaced unless
    `exit_layers` is set, which also sets `num_exits`. `router_width` and `adapter_width` are inner widths. None means
    the paper's: ⌊0.66 `width`⌋ for routers and `width` for adapters. If `adapter_width` is 0, there are no adapters. If
    `num_kv_heads` is None, every head has its own keys and values.
    """

    num_layers: int
    width: int
    mlp_width: int
    num_heads: int
    num_exits: int
    vocab_size: int
    context: int
    loops: int = 1
    exit_layers: tuple[int, ...] = ()
    num_kv_heads: int | None = None
    router_width: int | None = None
    adapter_width: int | None = None
    tied_head: bool = False

    def __post_init__(self) -> None:
        counts = ("num_layers", "width", "mlp_width", "num_heads", "num_exits", "vocab_size", "context", "loops")
        if self.exit_layers:
            object.__setattr__(self, "num_exits", len(self.exit_layers))
        for name in counts:
            require(getattr(self, name) >= 1, f"{name} must be at least 1")

    @property
    def exit_depths(self) -> list[int]:
        """The number of layers before each exit, l_1 … l_N. Raise `ValueError` for exits that the model cannot have."""
        return list(self.exit_layers) or even_exit_layers(self.num_layers * self.loops, self.num_exits)

    def config(self, vocab_size: int, end_token: int) -> NviumConfig:
        return NviumConfig(
            vocab_size=vocab_size,
            exit_layers=self.exit_depths,
            bos_token_id=end_token,
            eos_token_id=end_token,
            **{theirs: getattr(self, ours) for ours, theirs in CONFIG_FIELDS.items()},
        )


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that a training run depends on except its text.

    - `initial`: folder or Hub name of the model to start from; None means random weights.
    - `tokenizer`: folder or Hub name of the tokenizer; None means the initial model's tokenizer. Without an initial
      model, None means that a byte-level BPE is trained on the text.
    - `evaluations`: number of evaluations on the validation text. They are evenly spaced, and the last is at the end.
    - `model`, `objective`: names such as `package.module.NAME` of what replaces ours: a function that builds the model,
      and the loss.
    """

    shape: ModelShape
    initial: str | None = None
    tokenizer: str | None = None
    text: TextKind = "documents"
    total_tokens: int
    tokens_per_step: int
    learning_rate: LearningRate
    router_warmup: RouterWarmup = field(default_factory=RouterWarmup)
    beta: BetaSettings
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    seed: int = 0
    checkpoint_every: int = 200
    evaluations: int = 1
    validation_tokens: int = 200_000
    model: str | None = None
    objective: str | None = None

    def __post_init__(self) -> None:
        for name in ("total_tokens", "tokens_per_step", "checkpoint_every", "validation_tokens"):
            require(getattr(self, name) >= 1, f"{name} must be at least 1")
        for name in ("evaluations", "seed"):
            require(getattr(self, name) >= 0, f"{name} must not be negative")
        require(self.seed < 2**63, "seed must be below 2⁶³")
        trains_tokenizer = self.tokenizer is None and self.initial is None
        fits = not trains_tokenizer or MIN_TRAINED_VOCABULARY <= self.shape.vocab_size <= MAX_TRAINED_VOCABULARY
        require(fits, f"vocab_size must be in [{MIN_TRAINED_VOCABULARY}, {MAX_TRAINED_VOCABULARY}]")
        context = self.shape.context
        require(self.tokens_per_step % context == 0, f"tokens_per_step must be a multiple of the context, {context}")

    @property
    def num_steps(self) -> int:
        return max(1, self.total_tokens // self.tokens_per_step)

    @property
    def windows_per_step(self) -> int:
        return self.tokens_per_step // self.shape.context


def swiglu_width(width: int) -> int:
    """Return the authors' and usual MLP width of a SwiGLU, 8/3 of the width, rounded up to a multiple of 8."""
    return 8 * -(-width // 3)


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


WIDTH_MULTIPLE = 8
RUN = re.compile(r"runs/([^/]+)/model")
"""Matches the `initial` of a recipe that starts from another recipe's model."""


def dense_twin(recipe: Recipe) -> Recipe:
    """Remove exits and adapters, and widen the MLPs in multiples of 8 to at least the same number of parameters.

    The authors use this rule, and it reproduces the widths in the paper. If the recipe starts from another recipe's
    model, the twin starts from the twin of that recipe. The twin of a looped model has a layer for each of its calls,
    and so more parameters.
    """
    depth = recipe.shape.num_layers * recipe.shape.loops
    layers = replace(recipe.shape, num_layers=depth, loops=1, num_exits=1, exit_layers=())
    shape = replace(layers, router_width=None, adapter_width=0)
    missing = num_parameters(recipe.shape) - num_parameters(shape)
    widened = shape.mlp_width + added_mlp_width(max(0, missing), shape.width, shape.num_layers)
    initial = recipe.initial and RUN.sub(r"runs/\1-dense/model", recipe.initial)
    shape = replace(shape, mlp_width=widened)
    return replace(recipe, shape=shape, beta=BetaSettings(initial=0.0), initial=initial)


@cache
def num_parameters(shape: ModelShape) -> int:
    """Count all parameters, without allocating them. A tied head counts once."""
    short = replace(shape, num_layers=shape.num_exits, loops=1, exit_layers=())  # all layers have the same size
    model = Nvium.empty(short.config(shape.vocab_size, end_token=0))
    per_layer = sum(weight.numel() for weight in model.model.layers[0].parameters())
    return model.num_parameters() + (shape.num_layers - short.num_layers) * per_layer


def added_mlp_width(num_missing: int, width: int, num_layers: int) -> int:
    """Return the smallest multiple of 8 that, added to the MLPs' width, adds at least `num_missing` parameters."""
    per_multiple = WIDTH_MULTIPLE * 3 * width * num_layers
    return WIDTH_MULTIPLE * -(-num_missing // per_multiple)
