from dataclasses import replace
from functools import cache

import pytest
import torch
from transformers import initialization as init

from nvium_core.training.initial import initial_model
from nvium_core.training.recipes.catalogue import EXAMPLES, RECIPES, pretrained, recipe_named
from nvium_core.training.recipes.recipe import ModelShape, RecipeError, dense_twin, num_parameters

DEPTHS = (6, 12, 24, 36, 48)
PAPER_MILLIONS = {"24x128": 13, "24x256": 36, "24x512": 112, "24x768": 226, "24x1024": 381, "24x1536": 806}
PAPER_MILLIONS |= {"6x768": 99, "12x768": 141, "36x768": 311, "48x768": 396}

STEPS = 4012, 5518, 8509, 17_251, 14_517, 30_748, 7531, 10_771, 23_731, 30_211, 56_668
PUBLISHED_STEPS = dict(zip([*PAPER_MILLIONS, "48x1536"], STEPS, strict=True))

TWIN_WIDTHS = {
    128: [432, 392, 368, 360, 360],
    256: [864, 776, 736, 720, 712],
    512: [1712, 1544, 1456, 1432, 1416],
    768: [2568, 2312, 2184, 2136, 2120],
    1024: [3424, 3080, 2912, 2856, 2824],
    1536: [5120, 4608, 4352, 4272, 4224],
}
"""The authors' MLP widths of dense twins by the model's width, for 6, 12, 24, 36 and 48 layers."""

TWIN_WIDTHS_BY_EXITS = {2: 2112, 3: 2144, 4: 2184, 6: 2248, 8: 2320, 12: 2464}
"""The authors' MLP widths of dense twins at 24 × 768, by the number of exits."""


@cache
def parameters_on_meta(shape: ModelShape) -> int:
    recipe = replace(recipe_named("tiny", []), shape=shape, tokenizer="any")
    with torch.device("meta"), init.no_init_weights():
        model = initial_model(recipe, shape.vocab_size, 0)
    model.tie_weights()
    return sum(parameter.numel() for parameter in model.parameters())


def test_every_recipe_and_its_twin_have_the_same_parameters_and_text():
    for name in (*RECIPES, *EXAMPLES):
        recipe, twin = recipe_named(name, []), recipe_named(f"{name}-dense", [])
        assert recipe.num_steps > 1, name
        assert num_parameters(recipe.shape) == parameters_on_meta(recipe.shape), name
        assert num_parameters(twin.shape) == parameters_on_meta(twin.shape), name
        surplus = num_parameters(twin.shape) - num_parameters(recipe.shape)
        one_multiple = 8 * 3 * recipe.shape.width * recipe.shape.num_layers
        assert 0 <= surplus < one_multiple and surplus <= 0.02 * num_parameters(recipe.shape), name
        assert (twin.shape.num_exits, twin.shape.adapter_width) == (1, 0), name
        for field in ("total_tokens", "tokens_per_step", "seed"):
            assert getattr(twin, field) == getattr(recipe, field), name
        assert (twin.shape.num_layers, twin.shape.width) == (recipe.shape.num_layers, recipe.shape.width), name


def test_parameter_counts_are_the_papers():
    for shape, millions in PAPER_MILLIONS.items():
        assert round(num_parameters(recipe_named(f"paper-{shape}", []).shape) / 1e6) == millions, shape
    assert round(num_parameters(recipe_named("paper-48x1536", []).shape) / 1e9, 1) == 1.5


def test_steps_agree_with_the_authors_to_a_fifth_of_a_percent():
    found = {shape: recipe_named(f"paper-{shape}", []).num_steps for shape in PUBLISHED_STEPS}
    assert found == pytest.approx(PUBLISHED_STEPS, rel=2e-3)


def test_dense_twins_are_as_wide_as_the_authors():
    for width, expected in TWIN_WIDTHS.items():
        assert [dense_twin(pretrained(layers, width)).shape.mlp_width for layers in DEPTHS] == expected
    for num_exits, mlp_width in TWIN_WIDTHS_BY_EXITS.items():
        assert recipe_named("paper-24x768-dense", [f"shape.num_exits={num_exits}"]).shape.mlp_width == mlp_width


def test_a_twin_follows_the_settings_and_the_initial_model_of_its_recipe():
    settings = ["shape.width=96", "shape.mlp_width=256", "total_tokens=4096"]
    twin = recipe_named("tiny-dense", settings)
    assert (twin.shape.width, twin.total_tokens) == (96, 4096)
    assert twin == dense_twin(recipe_named("tiny", settings))
    assert recipe_named("stories-chat", []).initial == "runs/stories-24/model"
    assert recipe_named("stories-chat-dense", []).initial == "runs/stories-24-dense/model"


def test_a_looped_recipe_has_exits_after_its_loops_and_its_dense_twin_as_many_layer_calls():
    recipe = recipe_named("small", ["shape.num_layers=4", "shape.loops=4"])
    looped, twin = recipe.shape, dense_twin(recipe).shape
    config = looped.config(looped.vocab_size, end_token=0)
    assert (config.num_hidden_layers, config.num_loops, config.exit_layers) == (4, 4, [4, 8, 12, 16])
    untied = replace(looped, num_layers=16, loops=1)
    assert num_parameters(looped) == num_parameters(replace(looped, loops=1)) < num_parameters(untied)
    assert (twin.num_layers, twin.loops, twin.num_exits) == (16, 1, 1)


def test_an_unknown_recipe_is_refused_with_suggestions():
    with pytest.raises(RecipeError, match=r"'papr-24x768'; did you mean paper-24x768.*\? `nvium recipes` lists all"):
        recipe_named("papr-24x768", [])
    with pytest.raises(RecipeError, match=r"recipe paper-24x769: the width must be one of 128, .*1536"):
        recipe_named("paper-24x769", [])
    with pytest.raises(RecipeError, match=r"^unknown recipe 'huge'; `nvium recipes` lists all recipes$"):
        recipe_named("huge", [])
