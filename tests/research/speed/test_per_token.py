import pytest

from nvium_core import Engine, EngineConfig, LoadedModel, SamplingParams
from research.speed import per_token
from research.speed.per_token import DENSE, FULL_DEPTH, OURS, TimedToken, compared, measure, milliseconds, staircase
from tests.byte_model import EXIT_LAYERS, load_byte_model
from tests.random_models import random_model

PROMPTS = {"short": ["A fox.", "Hens"], "long": ["Once upon a time " * 10]}


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_byte_model(context=64)


def answer(*seconds: float, exit_: int = 1) -> list[TimedToken]:
    return [TimedToken(5, exit_, 0.5, each) for each in seconds]


def test_the_time_of_a_token_is_the_answers_over_its_length():
    answers = [answer(0.010, 0.002), answer(0.008, 0.003)]
    assert milliseconds(answers) == pytest.approx([6, 5.5])
    assert milliseconds(answers, first=1) == pytest.approx([2, 3])


def test_ratios_are_medians_over_pairs_of_answers_and_means_over_categories():
    ours = {"qa": [answer(0.002, 0.002)] * 3, "math": [answer(0.004, 0.004)]}
    dense = {"qa": [answer(0.009, 0.003), answer(0.900, 0.900), answer(0.004, 0.004)], "math": [answer(0.004, 0.008)]}
    figures = compared({OURS: ours, DENSE: dense}, {"qa": 3, "math": 1})
    assert figures["ratios"] == {DENSE: pytest.approx((3 + 1.5) / 2)}
    assert figures["decoding_ratios"] == {DENSE: pytest.approx((2 + 2) / 2)}
    assert figures["categories"]["qa"]["milliseconds"] == {OURS: pytest.approx(2), DENSE: pytest.approx(6)}


def test_the_staircase_has_the_times_of_each_exit_without_first_tokens():
    spoken = [*answer(9.0), *answer(0.001, 0.003, 0.002), *answer(0.007, exit_=3)]
    first, second, third = staircase({"qa": [spoken]}, EXIT_LAYERS)
    assert (first["tokens"], first["median"]) == (3, pytest.approx(2))
    assert (second["tokens"], second["layer"]) == (0, EXIT_LAYERS[1])
    assert (third["tokens"], third["median"], third["low"]) == (1, pytest.approx(7), pytest.approx(7))


def test_all_contenders_answer_every_prompt_in_every_trial(loaded):
    twin = LoadedModel("dense", random_model([4], vocab_size=257, context=64), loaded.tokenizer)
    figures = measure(loaded, twin, PROMPTS, num_tokens=8, trials=2)
    assert {name: each["prompts"] for name, each in figures["categories"].items()} == {"short": 2, "long": 1}
    assert set(figures["ratios"]) == {FULL_DEPTH, DENSE}
    assert figures["prompts_cut"] == 1
    times = [ms for each in figures["categories"].values() for ms in each["milliseconds"].values()]
    assert len(times) == 6
    assert min(times) > 0
    assert sum(step["tokens"] for step in figures["staircase"]) == 2 * 3 * 7


def test_measured_answers_equal_the_engines(loaded):
    params = SamplingParams(max_tokens=12, seed=4, ignore_eos=True)
    spoken = per_token.generate(Engine(loaded.model), [1, 2, 3], params)
    [completion] = Engine(loaded.model, EngineConfig(schedule="whole")).generate([[1, 2, 3]], params)
    assert [token.token_id for token in spoken] == completion.token_ids
    assert [token.exit for token in spoken] == completion.exits
    assert all(token.seconds >= 0 for token in spoken)
