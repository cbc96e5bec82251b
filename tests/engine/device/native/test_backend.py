from nvium_core import SamplingParams
from nvium_core.engine.device.native.backend import Seats
from nvium_core.engine.schedule.sequence import Sequence


def test_a_sequence_that_returns_to_an_old_seat_has_all_its_tokens_there():
    """The rows of another seat came from the prefix cache, so they are no longer pending."""
    seats = Seats(2, context=16)
    sequence = Sequence("x", [1, 2], SamplingParams(max_tokens=14), seed=0, num_blocks=2, arrival=0)
    for seat in (0, 1, 1, 0):
        sequence.seat = seat
        seats.update(sequence)
        memory = seats.memory[seat]
        assert memory is not None
        assert memory.tokens[: sequence.num_tokens].tolist() == sequence.token_ids
        for token_id in (3, 4, 5):
            sequence.append(token_id)
        sequence.start_at(sequence.num_tokens - 1)
