from nvium_core.bench.contenders.contender import Generation
from nvium_core.bench.interference import states, stolen_seconds, watched


def turn(seconds: float, **disturbed: float) -> Generation:
    return Generation(seconds=seconds, first_token_seconds=[], token_ids=[], **disturbed)


def test_quiet_and_disturbed_turns_have_a_median_each():
    turns = [turn(1), turn(2, alone_seconds=0.2), turn(1, alone_seconds=0.005), turn(1, stolen_seconds=64)]
    found = states(turns, [10.0, 5.0, 12.0, 9.0])
    assert found["alone_seconds"] == [0, 0.2, 0.005, 0]
    assert found["states"] == {
        "quiet": {"turns": 2, "tokens_per_second": 11},
        "disturbed": {"turns": 2, "tokens_per_second": 7},
    }


def test_a_turn_records_only_what_happened_during_it():
    found = watched(turn)(3)
    assert found.seconds == 3
    assert 0 <= found.stolen_seconds <= stolen_seconds() and found.alone_seconds == 0
