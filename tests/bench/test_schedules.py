"""The schedule benchmark, on a model too small for its times to mean anything."""

import pytest

from nvium_core import InvalidRequest
from nvium_core.bench import schedules
from nvium_core.bench.schedules import measure, measure_window, pointwise_median, token_limit
from nvium_core.engine.params import EngineConfig
from nvium_core.engine.schedule.costs import StepCosts
from tests.bench.tiny import tiny_subject


def test_every_schedule_is_measured_beside_synchronous_and_beside_what_is_simulated() -> None:
    figures = measure(tiny_subject(), sequences=(1, 3), tokens=6, repeats=1, simulated_tokens=500)
    assert [row["sequences"] for row in figures["rows"]] == [1, 3]
    for row in figures["rows"]:
        rates = {name: seen["tokens_per_second"] for name, seen in row["schedules"].items()}
        assert rates.keys() == {"optimal", "sweep", "synchronous"}
        assert sum(row["routing"]) == pytest.approx(1)
        for name, seen in row["schedules"].items():
            assert seen["over_synchronous"] == pytest.approx(rates[name] / rates["synchronous"])
            share = seen["over_synchronous"] / seen["predicted_over_synchronous"]
            assert seen["share_of_predicted"] == pytest.approx(share)
        assert row["optimal_is_never_slower"] == (row["schedules"]["optimal"]["over_synchronous"] >= 0.97)
        assert StepCosts.from_dict(row["calibrated_costs"]).num_blocks == 3


def test_schedules_are_simulated_as_costs_and_exits_were_seen() -> None:
    costs, alone = StepCosts.linear([1, 1], [0, 0]), EngineConfig(max_sequences=1)
    rates = schedules.predict(schedules.Machine(routing=(0.5, 0.5), costs=costs, config=alone), 4000)
    assert rates["synchronous"] == pytest.approx(1 / 2, rel=0.02)
    assert rates["sweep"] == rates["optimal"] == pytest.approx(1 / 1.5, rel=0.02)


@pytest.mark.parametrize("num_sequences", [1, 4])
def test_all_sequences_run_while_the_clock_does_and_none_afterwards(num_sequences: int) -> None:
    subject = tiny_subject()
    engine = subject.engine(max_sequences=num_sequences)
    seen = measure_window(engine, [subject.prompt] * num_sequences, num_tokens=20, turn=1)
    assert 20 * num_sequences <= seen.exits.total() < 21 * num_sequences
    assert not engine.has_work
    engine.check_integrity()


def test_sequences_of_one_spell_have_draws_of_their_own() -> None:
    subject = tiny_subject()
    engine = subject.engine(max_sequences=4, schedule="sweep")
    blocks = []

    def step() -> list[object]:
        events = original()
        blocks.append({sequence.front_block for sequence in engine.scheduler.running})
        return events

    original, engine.step = engine.step, step  # type: ignore[method-assign,assignment]
    measure_window(engine, [subject.prompt] * 4, num_tokens=20, turn=0)
    assert max(map(len, blocks)) > 1


def test_a_sequence_may_be_luckier_than_others_as_far_as_the_context_goes() -> None:
    assert token_limit(context=1000, num_prompt_tokens=10, num_tokens=100) > 100
    assert token_limit(context=100, num_prompt_tokens=10, num_tokens=80) == 90


def test_costs_of_several_engines_become_one_point_by_point() -> None:
    costs = [
        StepCosts({0: {1: 1.0, 2: seconds}, 1: {4: 9 * seconds}}, passes={1: 5 * seconds})
        for seconds in (2.0, 7.0, 3.0)
    ]
    assert pointwise_median(costs).points == {0: {1: 1.0, 2: 3.0}, 1: {4: 27.0}}
    assert pointwise_median(costs).passes == {1: 15.0}


def test_more_tokens_than_the_context_holds_are_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match=r"^tokens: .*251"):
        measure(tiny_subject(), tokens=252)
