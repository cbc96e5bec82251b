from dataclasses import replace

from nvium_core.training.recipes.catalogue import recipe_named
from nvium_core.training.recipes.twins import dense_twin, num_parameters


def test_a_looped_recipe_has_exits_after_its_loops_and_the_parameters_of_its_layers():
    looped = recipe_named("small", ["shape.num_layers=4", "shape.loops=4"]).shape
    config = looped.config(looped.vocab_size, end_token=0)
    assert (config.num_hidden_layers, config.num_loops, config.exit_layers) == (4, 4, [4, 8, 12, 16])
    untied = replace(looped, num_layers=16, loops=1)
    assert num_parameters(looped) == num_parameters(replace(looped, loops=1)) < num_parameters(untied)


def test_the_dense_twin_of_a_looped_recipe_has_as_many_layer_calls():
    twin = dense_twin(recipe_named("small", ["shape.num_layers=4", "shape.loops=4"])).shape
    assert (twin.num_layers, twin.loops, twin.num_exits) == (16, 1, 1)
