import pytest

from nvium_core.training.recipes.catalogue import recipe_named
from nvium_core.training.recipes.recipe import RecipeError


def test_settings_change_what_they_name_and_nothing_else() -> None:
    changed = recipe_named("tiny", ["shape.width=96", "learning_rate.maximum=1e-4", "total_tokens=1_000_000"])
    assert (changed.shape.width, changed.learning_rate.maximum, changed.total_tokens) == (96, 1e-4, 1_000_000)
    assert changed.shape.num_layers == recipe_named("tiny", []).shape.num_layers
    assert changed.learning_rate.warmup == recipe_named("tiny", []).learning_rate.warmup


def test_settings_that_cannot_be_beside_one_another_are_named_together() -> None:
    with pytest.raises(RecipeError, match=r"^--set beta.adaptive=true --set beta.depth=0.5: β is either"):
        recipe_named("tiny", ["seed=3", "beta.adaptive=true", "beta.depth=0.5"])


def test_layers_of_exits_may_be_set() -> None:
    shape = recipe_named("tiny", ["shape.exit_layers=1,4", "shape.num_exits=2"]).shape
    assert shape.config(512, end_token=0).exit_layers == [1, 4]
    assert recipe_named("small", ["shape.exit_layers="]).shape.exit_depths == [3, 6, 9, 12]


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        ("seed", "expected key=value"),
        ("speed=1", "no such setting; there are .*learning_rate"),
        ("shape.depth=1", "no such setting; there are .*num_layers"),
        ("shape=1", "not a single value"),
        ("seed.x=1", "not a single value"),
        ("=1", "no such setting"),
        ("shape.width=wide", "expected a whole number such as 100000"),
        ("shape.width=1.5", "expected a whole number"),
        ("shape.width=1e999", "finite"),
        ("learning_rate.maximum=", "expected a number"),
        ("learning_rate.maximum=nan", "finite"),
        ("beta.initial=inf", "finite"),
        ("beta.adaptive=yes", "true or false"),
        ("beta.adaptive=true", "either adaptive or steered: set beta.depth=0"),
        ("learning_rate.kind=step", "cosine, wsd"),
        ("optimizer.clip_norm=0", "clip_norm"),
        ("text=poems", "documents, conversations"),
        ("shape.exit_layers=1,x", "expected a whole number"),
        ("shape.tied_head=maybe", "true or false"),
        ("tokens_per_step=0", "tokens_per_step"),
        ("shape.context=0", "context"),
        ("shape.vocab_size=100000", "vocab_size"),
        ("learning_rate.warmup=1", "warmup"),
        ("seed=-1", "seed"),
        ("evaluations=-1", "evaluations"),
        ("validation_tokens=0", "validation_tokens"),
        ("router_warmup.share=5", "share"),
        ("router_warmup.alpha=-1", "alpha"),
        ("diet.other_epochs=-1", "other_epochs"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_by_name(setting: str, complaint: str) -> None:
    with pytest.raises(RecipeError, match=complaint) as refused:
        recipe_named("tiny", [setting])
    assert f"--set {setting}" in str(refused.value)


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        ("shape.num_exits=3", "divided evenly"),
        ("shape.num_heads=5", "attention heads"),
        ("shape.exit_layers=1,4", "places 2 exits, and num_exits is 4"),
        ("shape.exit_layers=1,3,2,4", "increasing"),
        ("short_context=512", "at most shape.context"),
        ("tokens_per_step=2000", "multiple of 128"),
        ("tokens_per_step=64", "multiple of 128"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(setting: str, complaint: str) -> None:
    with pytest.raises(RecipeError, match=f"recipe tiny: .*{complaint}"):
        recipe_named("tiny", [setting])


def test_windows_are_long_only_in_the_last_share_of_a_run() -> None:
    recipe = recipe_named("tiny", ["shape.context=256", "short_context=64", "long_context_share=0.25"])
    assert [recipe.context_at(progress) for progress in (0.0, 0.74, 0.75, 1.0)] == [64, 64, 256, 256]
