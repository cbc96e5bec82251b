import pytest

from nvium_core import Engine, EngineConfig, InvalidRequest, SamplingParams
from nvium_core.bench.harness import conclusion, interleaved, load_subject, ratio, spread, timed
from tests.bench.tiny import tiny_subject


def test_turns_alternate_in_order_and_the_first_is_a_warm_up():
    order: list[str] = []

    def contender(name: str, number: int) -> int:
        order.append(name)
        return number

    results = interleaved({n: lambda number, n=n: contender(n, number) for n in "ab"}, repeats=3, label="")
    assert "".join(order) == "abbaabba"
    assert results == {"a": [1, 2, 3], "b": [1, 2, 3]}


def test_ratios_are_computed_per_turn_and_the_conclusion_needs_three_turns_that_agree():
    clear = ratio("gain", [2.0, 30.0, 4.0], [1.0, 10.0, 1.0])
    assert clear == {"gain": 3.0, "gain_quartiles": [2.5, 3.5], "gain_turns": 3}
    unclear, few = ratio("gain", [0.9, 1.0, 1.2], [1, 1, 1]), ratio("gain", [3.0], [1.0])
    assert spread("gain", clear) == "3.00 (2.50 to 3.50, 3 turns)"
    assert spread("gain", few) == "3.00 (1 of 3 turns: too few)"
    sentence = conclusion(4, "gain", {1: clear, 2: unclear, 8: few})
    assert "1 stream 3.00 times as fast (2.50 to 3.50), 2 streams no difference seen (0.95 to 1.10)" in sentence
    assert sentence.endswith("8 streams too few turns (1 of 3).")
    assert conclusion(1, "gain", {1: clear}) == "The model has no early exits."


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
    subject = load_subject(None, "4x128", ".5,.25,.25", None, "cpu", "bfloat16")
    assert subject.model.config.num_exits == 3
    assert subject.as_dict() == {**subject.as_dict(), "model": "random-4x128", "device": "cpu", "dtype": "bfloat16"}


@pytest.mark.parametrize("routing", [".5,x", "-.5,1.5"])
def test_an_invalid_routing_is_rejected_by_name(routing):
    with pytest.raises(InvalidRequest, match=r"^routing: "):
        load_subject(None, "4x128", routing, None, "cpu", "float32")
