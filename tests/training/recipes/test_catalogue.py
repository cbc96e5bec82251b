"""Every recipe: its model, its size beside the paper's, and its dense twin beside the authors'."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from transformers import get_wsd_schedule
from transformers import initialization as init

from nvium_core.training.baselines.layerskip import LayerSkip
from nvium_core.training.objective.methods import METHODS
from nvium_core.training.optimizer import OptimizerSettings
from nvium_core.training.recipes.catalogue import RECIPES, recipe_named
from nvium_core.training.recipes.paper import scaling
from nvium_core.training.recipes.parameters import num_parameters
from nvium_core.training.recipes.recipe import Method, ModelShape, RecipeError
from nvium_core.training.recipes.twins import dense_twin
from nvium_core.training.schedule import LearningRate

DEPTH_MILLIONS = {6: 99, 12: 141, 24: 226, 36: 311, 48: 396}
WIDTH_MILLIONS = {128: 13, 256: 36, 512: 112, 768: 226, 1024: 381, 1536: 806}

PUBLISHED_STEPS = {
    "paper-24x128": 4012,
    "paper-24x256": 5518,
    "paper-24x512": 8509,
    "paper-24x768": 17_251,
    "paper-24x1024": 14_517,
    "paper-24x1536": 30_748,
    "paper-6x768": 7531,
    "paper-12x768": 10_771,
    "paper-36x768": 23_731,
    "paper-48x768": 30_211,
    "paper-48x1536": 56_668,
}

TWIN_WIDTHS = {
    128: [432, 392, 368, 360, 360],
    256: [864, 776, 736, 720, 712],
    512: [1712, 1544, 1456, 1432, 1416],
    768: [2568, 2312, 2184, 2136, 2120],
    1024: [3424, 3080, 2912, 2856, 2824],
    1536: [5120, 4608, 4352, 4272, 4224],
}
"""The authors' MLP widths of dense twins, by the model's width and, in columns, 6, 12, 24, 36 and 48 layers."""

TWIN_WIDTHS_BY_EXITS = {2: 2112, 3: 2144, 4: 2184, 6: 2248, 8: 2320, 12: 2464}
"""The same at 24 × 768, by the number of exits."""


@cache
def parameters_on_meta(shape: ModelShape, method: Method = "nvium") -> int:
    build = METHODS[method].build
    recipe = replace(recipe_named("tiny", []), shape=shape, method=method, tokenizer="any")
    with torch.device("meta"), init.no_init_weights():
        model = build(recipe, shape.vocab_size, 0)
    model.tie_weights()
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_describes_a_model_that_can_be_built(name: str) -> None:
    recipe = recipe_named(name, [])
    config = recipe.shape.config(recipe.shape.vocab_size, end_token=0)
    assert config.num_exits == recipe.shape.num_exits
    assert recipe.num_steps > 1


@pytest.mark.parametrize("name", RECIPES)
def test_the_counted_parameters_are_those_of_the_model(name: str) -> None:
    recipe = recipe_named(name, [])
    method = "nvium" if recipe.method == "retrofit" else recipe.method
    assert num_parameters(recipe) == parameters_on_meta(recipe.shape, method)


@pytest.mark.parametrize("name", RECIPES)
def test_a_dense_twin_has_no_exits_and_the_same_parameters_and_text(name: str) -> None:
    recipe, twin = recipe_named(name, []), recipe_named(f"{name}-dense", [])
    one_multiple = 8 * 3 * recipe.shape.width * recipe.shape.num_layers
    surplus = num_parameters(twin) - num_parameters(recipe)
    if recipe.method == "nvium":
        assert 0 <= surplus < one_multiple
    assert abs(surplus) <= 0.02 * num_parameters(recipe) or recipe.method == "retrofit"
    assert (twin.shape.num_exits, twin.shape.adapter_width) == (1, 0)
    assert (twin.shape.num_layers, twin.shape.width) == (recipe.shape.num_layers, recipe.shape.width)
    assert (twin.total_tokens, twin.tokens_per_step, twin.seed) == (
        recipe.total_tokens,
        recipe.tokens_per_step,
        recipe.seed,
    )


@pytest.mark.parametrize("name", ["tales", "tiny", "paper-24x128"])
def test_the_counted_parameters_of_a_twin_are_those_of_the_model(name: str) -> None:
    twin = recipe_named(f"{name}-dense", [])
    assert num_parameters(twin) == parameters_on_meta(twin.shape)


@pytest.mark.parametrize(("layers", "millions"), DEPTH_MILLIONS.items())
def test_parameters_by_depth_are_the_papers_with_the_exits_counted(layers: int, millions: int) -> None:
    assert round(num_parameters(recipe_named(f"paper-{layers}x768", [])) / 1e6) == millions


@pytest.mark.parametrize(("width", "millions"), WIDTH_MILLIONS.items())
def test_parameters_by_width_are_the_papers_with_the_exits_counted(width: int, millions: int) -> None:
    assert round(num_parameters(recipe_named(f"paper-24x{width}", [])) / 1e6) == millions


def test_without_the_exits_the_counts_would_be_others() -> None:
    shape = recipe_named("paper-24x768", []).shape
    bare = recipe_named("paper-24x768", ["shape.num_exits=1", "shape.exit_layers=", "shape.adapter_width=0"])
    assert bare.shape.mlp_width == shape.mlp_width and round(num_parameters(bare) / 1e6) == 219


def test_the_largest_has_a_billion_and_a_half() -> None:
    assert round(num_parameters(recipe_named("paper-48x1536", [])) / 1e9, 1) == 1.5


def test_the_retrofitted_llama_is_as_large_as_the_published_one() -> None:
    assert num_parameters(recipe_named("paper-retrofit-dense", [])) == 1_235_814_400


@pytest.mark.parametrize(("name", "steps"), PUBLISHED_STEPS.items())
def test_steps_are_the_authors_to_a_fifth_of_a_percent(name: str, steps: int) -> None:
    assert recipe_named(name, []).num_steps == pytest.approx(steps, rel=2e-3)


@pytest.mark.parametrize("width", TWIN_WIDTHS)
def test_dense_twins_are_as_wide_as_the_authors(width: int) -> None:
    twins = [dense_twin(scaling(layers, width)) for layers in DEPTH_MILLIONS]
    assert [twin.shape.mlp_width for twin in twins] == TWIN_WIDTHS[width]


@pytest.mark.parametrize(("num_exits", "mlp_width"), TWIN_WIDTHS_BY_EXITS.items())
def test_dense_twins_by_the_number_of_exits_are_too(num_exits: int, mlp_width: int) -> None:
    assert recipe_named(f"paper-exits-{num_exits}-dense", []).shape.mlp_width == mlp_width


def test_an_adaptive_beta_is_told_of_losses_by_runs_that_are_evaluated_alike() -> None:
    for name in ("small-adaptive", "paper-48x1536"):
        recipe, twin = recipe_named(name, []), recipe_named(f"{name}-dense", [])
        assert recipe.beta.adaptive and not twin.beta.adaptive
        assert 1 < recipe.evaluations == twin.evaluations < recipe.num_steps


def test_a_twin_follows_the_settings_of_its_recipe() -> None:
    settings = ["shape.width=96", "shape.mlp_width=256", "total_tokens=4096"]
    twin = recipe_named("tiny-dense", settings)
    assert (twin.shape.width, twin.total_tokens) == (96, 4096)
    assert twin == dense_twin(recipe_named("tiny", settings))


def test_the_twin_of_a_dense_model_is_itself() -> None:
    name = "paper-isoflop-26x768"
    assert recipe_named(f"{name}-dense", []) == recipe_named(name, [])


def test_a_tuned_models_twin_starts_from_the_dense_model() -> None:
    assert recipe_named("paper-sft-24x768", []).initial == "runs/paper-24x768/model"
    assert recipe_named("paper-sft-24x768-dense", []).initial == "runs/paper-24x768-dense/model"
    assert recipe_named("paper-retrofit-dense", []).initial == "meta-llama/Llama-3.2-1B"


@pytest.mark.parametrize("initial", ["elsewhere/tales-dense/model", "runs/mine/model", "none"])
def test_a_twin_starts_from_what_is_set(initial: str) -> None:
    expected = None if initial == "none" else initial
    assert recipe_named("tales-again-dense", [f"initial={initial}", "seed=2"]).initial == expected


def test_a_retrofit_begins_with_a_model_of_its_own_backbone() -> None:
    shape, dense = recipe_named("small-retrofit", []).shape, recipe_named("small-dense", []).shape
    assert (shape.num_layers, shape.width, shape.mlp_width) == (dense.num_layers, dense.width, dense.mlp_width)


def test_a_baseline_is_the_dense_model_with_exits() -> None:
    for name in ("calm", "layerskip"):
        shape, dense = recipe_named(f"paper-{name}", []).shape, recipe_named("paper-24x768-dense", []).shape
        assert (shape.width, shape.mlp_width) == (dense.width, dense.mlp_width)
    assert recipe_named("paper-calm", []).shape.exit_depths == [6, 12, 18, 24]
    assert recipe_named("paper-layerskip", []).shape.exit_depths == list(range(2, 25, 2))


def test_layerskips_settings_are_the_authors_and_belong_to_its_recipes() -> None:
    authors = LayerSkip(
        max_dropout=0.3,
        dropout_in_time="exponential",
        early_loss_scale=1.0,
        curriculum="gradual",
        rotation_period=8,
    )
    assert recipe_named("paper-layerskip", []).layerskip == authors
    assert recipe_named("paper-layerskip", []).learning_rate == LearningRate(maximum=4e-4)
    settings = ["layerskip.max_dropout=0.2", "layerskip.curriculum=rotational", "layerskip.rotation_period=4"]
    changed = recipe_named("paper-layerskip", settings)
    assert changed.layerskip == LayerSkip(max_dropout=0.2, curriculum="rotational", rotation_period=4)
    with pytest.raises(RecipeError, match="layerskip means nothing to nvium"):
        recipe_named("tiny", settings)


def test_tuning_reads_two_epochs_one_conversation_to_a_window_in_the_authors_steps() -> None:
    recipe = recipe_named("paper-sft-24x768", [])
    assert (recipe.epochs, recipe.packing, recipe.answers_only) == (2, False, False)
    assert (recipe.windows_of_a_step(0.0), recipe.short_context) == (128, 1024)
    assert recipe.learning_rate == LearningRate(maximum=1e-5, warmup=0.05, final_ratio=0)
    assert recipe.optimizer == OptimizerSettings(weight_decay=0.01, betas=(0.9, 0.999))
    assert recipe.num_steps == 2 * -(-892_375 // 128)
    assert recipe.reading(1000).total_tokens == 2 * 1000 * 1024
    with pytest.raises(RecipeError, match="reads 2 epochs of the text; set epochs=0 too"):
        recipe_named("paper-sft-24x768", ["total_tokens=1e6"])


def test_the_largest_models_rate_decays_as_in_the_authors_trainer() -> None:
    rate, num_steps = recipe_named("paper-48x1536", []).learning_rate, 1000
    parameter = torch.zeros(1, requires_grad=True)
    theirs = get_wsd_schedule(
        torch.optim.AdamW([parameter], lr=2e-4),
        num_warmup_steps=10,
        num_stable_steps=890,
        num_decay_steps=100,
        min_lr_ratio=0.1,
    ).lr_lambdas[0]
    for step in range(10, num_steps + 1):
        assert rate.at(step / num_steps) == pytest.approx(2e-4 * theirs(step))


def test_an_unknown_recipe_is_refused_with_what_is_near() -> None:
    with pytest.raises(RecipeError, match=r"'paper-24x769', but there is .*paper-24x768.*`nvium recipes` lists them"):
        recipe_named("paper-24x769", [])
    with pytest.raises(RecipeError, match=r"^no recipe 'huge'; `nvium recipes` lists them$"):
        recipe_named("huge", [])
