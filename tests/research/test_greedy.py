from nvium_core import Engine, SamplingParams
from research.greedy import decide
from tests.random_models import random_model


def test_tokens_and_exits_equal_the_engines():
    model = random_model([1, 2, 3, 4], seed=1)
    (completion,) = Engine(model).generate([[1, 2]], SamplingParams(max_tokens=40, temperature=0, ignore_eos=True))
    token_T, exit_T, explicit_T = decide(model, [1, 2, *completion.token_ids[:-1]], 1)
    assert token_T.tolist() == explicit_T.tolist() == completion.token_ids
    assert [exit_ + 1 for exit_ in exit_T.tolist()] == completion.exits
    assert {*completion.exits} == {1, 2, 3, 4}
