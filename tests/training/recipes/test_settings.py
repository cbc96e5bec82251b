import re

import pytest

from nvium_core.training.recipes.catalogue import recipe_named
from nvium_core.training.recipes.recipe import RecipeError


def test_settings_change_only_the_named_fields_such_as_the_layers_of_exits():
    changed = recipe_named("tiny", ["shape.width=96", "learning_rate.maximum=1e-4", "total_tokens=1_000_000"])
    assert (changed.shape.width, changed.learning_rate.maximum, changed.total_tokens) == (96, 1e-4, 1_000_000)
    assert changed.shape.num_layers == recipe_named("tiny", []).shape.num_layers
    assert changed.learning_rate.warmup == recipe_named("tiny", []).learning_rate.warmup


def test_a_list_of_exits_sets_their_number_and_a_number_alone_replaces_a_list():
    shape = recipe_named("tiny", ["shape.exit_layers=1,4"]).shape
    assert (shape.num_exits, shape.config(512, end_token=0).exit_layers) == (2, [1, 4])
    assert recipe_named("tiny", ["shape.exit_layers=1,4", "shape.num_exits=3"]).shape.exit_depths == [1, 4]
    assert recipe_named("paper-6x768", []).shape.exit_depths == [1, 2, 4, 6]
    assert recipe_named("paper-6x768", ["shape.num_exits=3"]).shape.exit_depths == [2, 4, 6]


def test_an_error_names_all_settings_that_contradict_one_another():
    with pytest.raises(RecipeError, match=r"^--set beta.initial=1 --set tokens_per_step=100: tokens_per_step must"):
        recipe_named("tiny", ["beta.initial=1", "tokens_per_step=100"])


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        ("seed", "expected key=value"),
        ("speed=1", "unknown key 'speed'; must be one of .*learning_rate"),
        ("shape.depth=1", "unknown key 'depth'; must be one of .*num_layers"),
        ("shape=1", "shape is a group; set one of its fields"),
        ("seed.x=1", "seed has no fields"),
        ("=1", "unknown key ''"),
        ("shape.width=wide", "must be an integer such as 100000"),
        ("shape.width=1.5", "must be an integer"),
        ("shape.width=1e999", "finite"),
        ("learning_rate.maximum=", "must be a number"),
        ("beta.adaptive=true", "unknown key 'adaptive'; must be one of depth, initial"),
        ("shape.tied_head=yes", "must be one of true, false"),
        ("learning_rate.kind=step", "cosine, wsd"),
        ("optimizer.clip_norm=0", "clip_norm"),
        ("text=poems", "documents, conversations"),
        ("shape.exit_layers=1,x", "must be an integer"),
        ("tokens_per_step=0", "tokens_per_step"),
        ("tokens_per_step=2000", "multiple of the context, 128"),
        ("shape.context=0", "context"),
        ("shape.vocab_size=100000", "vocab_size"),
        ("learning_rate.warmup=1", "warmup"),
        ("seed=-1", "seed"),
        ("evaluations=-1", "evaluations"),
        ("validation_tokens=0", "validation_tokens"),
        ("router_warmup.share=5", "share"),
        ("router_warmup.alpha=-1", "alpha"),
    ],
)
def test_an_invalid_setting_is_refused_by_name(setting, complaint):
    with pytest.raises(RecipeError, match=f"^--set {re.escape(setting)}: .*{complaint}"):
        recipe_named("tiny", [setting])


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        ("shape.num_exits=3", "divided evenly"),
        ("shape.num_heads=5", "multiple of num_attention_heads"),
        ("shape.exit_layers=1,3,2,4", "increasing"),
    ],
)
def test_contradictory_settings_are_refused(setting, complaint):
    with pytest.raises(RecipeError, match=f"recipe tiny: .*{complaint}"):
        recipe_named("tiny", [setting])
