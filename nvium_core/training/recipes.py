"""Recipes: what to train, as functions returning a frozen configuration; `nvium train NAME` runs one."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

from huggingface_hub.errors import StrictDataclassError

from nvium_core.errors import NviumError
from nvium_core.model.config import NviumConfig, even_exit_layers
from nvium_core.training.beta import BetaSettings
from nvium_core.training.data import Diet
from nvium_core.training.optimizer import OptimizerSettings
from nvium_core.training.schedule import LearningRate, RouterWarmup

MAX_VOCABULARY = 2**16  # token files hold 16 bits a token


class RecipeError(NviumError, ValueError):
    """An unknown recipe, or a setting it does not have; the message names it."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The model's shape; the vocabulary is the tokenizer's."""

    num_layers: int
    width: int
    mlp_width: int
    num_heads: int
    num_exits: int
    vocab_size: int
    context: int

    def __post_init__(self) -> None:
        for f in fields(self):
            check(getattr(self, f.name) >= 1, f"{f.name} must be at least 1")
        check(self.vocab_size <= MAX_VOCABULARY, f"vocab_size must be at most {MAX_VOCABULARY}")

    def config(self, vocab_size: int, end_token: int) -> NviumConfig:
        return NviumConfig(
            vocab_size=vocab_size,
            hidden_size=self.width,
            intermediate_size=self.mlp_width,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads,
            max_position_embeddings=self.context,
            exit_layers=even_exit_layers(self.num_layers, self.num_exits),
            bos_token_id=end_token,
            eos_token_id=end_token,
        )


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything a training run depends on besides its text."""

    shape: Shape
    total_tokens: int
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

    def __post_init__(self) -> None:
        for name in ("total_tokens", "tokens_per_step", "short_context", "checkpoint_every"):
            check(getattr(self, name) >= 1, f"{name} must be at least 1")
        check(0 <= self.long_context_share <= 1, "long_context_share must be between 0 and 1")

    @property
    def num_steps(self) -> int:
        return max(1, self.total_tokens // self.tokens_per_step)

    def context_at(self, progress: float) -> int:
        """Windows are short at first, as attention is cheaper so, and of full length in the last share of the run."""
        return self.shape.context if progress >= 1 - self.long_context_share else self.short_context


def tales() -> Recipe:
    """The embedded story-teller: 6.5M parameters, four exits, about two hours on two cores."""
    return Recipe(
        shape=Shape(num_layers=12, width=192, mlp_width=512, num_heads=3, num_exits=4, vocab_size=2048, context=1024),
        total_tokens=20_000_000,
        tokens_per_step=4096,
        short_context=256,
        long_context_share=0.07,
        learning_rate=LearningRate(maximum=8e-3, warmup=0.01, kind="wsd", decay=0.4, final_ratio=0.0),
        beta=BetaSettings(initial=0.02, depth=0.685),
        optimizer=OptimizerSettings(muon_rate=0.02),
        diet=Diet(simple_share=0.25, short_characters=4000, simple_epochs=2.0, other_epochs=0.5),
    )


def tiny() -> Recipe:
    """A model for trying the pipeline out: a minute on one core, and no sense in what it says."""
    return Recipe(
        shape=Shape(num_layers=4, width=64, mlp_width=176, num_heads=2, num_exits=4, vocab_size=512, context=128),
        total_tokens=200_000,
        tokens_per_step=2048,
        short_context=128,
        learning_rate=LearningRate(maximum=3e-3, warmup=0.05),
        beta=BetaSettings(initial=0.04, depth=0.68),
        checkpoint_every=50,
    )


RECIPES: dict[str, Callable[[], Recipe]] = {"tales": tales, "tiny": tiny}


def recipe_named(name: str, settings: list[str]) -> Recipe:
    """A recipe with `key=value` settings applied; keys are dotted paths such as `learning_rate.maximum`."""
    if name not in RECIPES:
        raise RecipeError(f"no recipe {name!r}; there are {', '.join(sorted(RECIPES))}")
    recipe = RECIPES[name]()
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise RecipeError(f"--set {setting}: expected key=value")
        recipe = _with(recipe, key.split("."), value, setting)
    try:
        recipe.shape.config(recipe.shape.vocab_size, end_token=0)
    except (ValueError, StrictDataclassError) as error:
        raise RecipeError(f"recipe {name}: {error.__cause__ or error}") from error
    return recipe


def _with(owner: Any, path: list[str], value: str, setting: str) -> Any:
    names = {f.name for f in fields(owner)}
    if path[0] not in names:
        raise RecipeError(f"--set {setting}: no such setting; there are {', '.join(sorted(names))}")
    current = getattr(owner, path[0])
    if (len(path) > 1 and not is_dataclass(current)) or (len(path) == 1 and is_dataclass(current)):
        raise RecipeError(f"--set {setting}: not a single value")
    changed = _with(current, path[1:], value, setting) if len(path) > 1 else _parsed(value, current, setting)
    try:
        return replace(owner, **{path[0]: changed})
    except ValueError as error:
        raise RecipeError(f"--set {setting}: {error}") from error


def _parsed(value: str, current: Any, setting: str) -> Any:
    if isinstance(current, str):
        return value
    if isinstance(current, bool):
        return _parsed_bool(value, setting)
    kind = int if isinstance(current, int) else float
    try:
        parsed = kind(value.replace("_", ""))
    except ValueError as error:
        raise RecipeError(f"--set {setting}: expected {kind.__name__}") from error
    if not math.isfinite(parsed):
        raise RecipeError(f"--set {setting}: must be finite")
    return parsed


def _parsed_bool(value: str, setting: str) -> bool:
    if value not in ("true", "false"):
        raise RecipeError(f"--set {setting}: expected true or false")
    return value == "true"


def check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
