import pytest

from nvium_core import Engine, EngineConfig, InvalidRequest, SamplingParams
from nvium_core.bench.harness import conclusion, interleaved, load_subject, median_ratio, timed
from tests.bench.tiny import tiny_subject


def test_turns_alternate_in_order_and_the_first_is_a_warm_up():
    order: list[str] = []

    def contender(name: str, number: int) -> int:
        order.append(name)
        return number

    results = interleaved({n: lambda number, n=n: contender(n, number) for n in "ab"}, repeats=3, label="")
    assert "".join(order) == "abbaabba"
    assert results == {"a": [1, 2, 3], "b": [1, 2, 3]}


def test_ratios_are_computed_per_turn_and_the_conclusion_is_one_sentence():
    gains = "1 stream 1.19 times as fast, 2 streams 0.95 times as fast, 8 streams equally fast"
    sentence = f"Compared with full depth, early exits make {gains}."
    assert conclusion(4, {1: 1.19, 2: 0.95, 8: 0.99}) == sentence
    assert conclusion(1, {1: 1.03}) == "The model has no early exits."
    assert median_ratio([2.0, 30.0, 4.0], [1.0, 10.0, 1.0]) == 3.0


def test_a_timed_run_gives_the_tokens_of_the_engine():
    subject = tiny_subject()
    params = SamplingParams(max_tokens=9, seed=3, ignore_eos=True)
    timing = timed(Engine(subject.model, EngineConfig()), [(subject.prompt, params), ([7, 8], params)])
    expected = Engine(subject.model, EngineConfig()).generate([subject.prompt, [7, 8]], params)
    assert timing.token_ids == [completion.token_ids for completion in expected]
    assert timing.exits == [completion.exits for completion in expected]
    assert timing.tokens_per_second == 2 * 9 / timing.seconds
    assert all(0 < first <= timing.seconds for first in timing.first_token_seconds)
    assert len(timing.first_token_seconds) == 2


def test_a_shape_has_the_exits_of_the_routing_and_the_requested_precision():
    subject = load_subject(None, "4x128", ".5,.25,.25", "cpu", "bfloat16")
    assert subject.model.config.num_exits == 3
    assert subject.as_dict() == {**subject.as_dict(), "model": "random-4x128", "device": "cpu", "dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("model", "shape", "routing", "field"),
    [
        ("some-model", "4x128", None, "shape"),
        (None, None, ".5,.5", "routing"),
        (None, "4x128", ".5,x", "routing"),
        (None, "4x128", "-.5,1.5", "routing"),
        (None, "4x127", None, "shape"),
    ],
)
def test_contradictory_options_are_rejected_by_name(model, shape, routing, field):
    with pytest.raises(InvalidRequest, match=f"^{field}: "):
        load_subject(model, shape, routing, "cpu", "float32")
