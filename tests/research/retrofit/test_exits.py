import torch

from nvium_core.bench.contenders.contender import Generation
from research.retrofit.exits import last_exit_of, speeds
from tests.bench.tiny import tiny_subject


def timing(seconds: float, exits: list[int]) -> Generation:
    return Generation(seconds=seconds, first_token_seconds=[1.0], token_ids=[[5, 6, 7, 8]], exits=[exits])


def test_depth_and_routing_are_measured_on_the_timed_tokens():
    early = timing(2.0, exits=[1, 1, 2, 3])
    dense = timing(4.0, exits=[1, 1, 1, 1])
    found = speeds({"early": [early], "dense": [dense]}, layers=[1, 2, 4])
    assert found["routing"] == [0.5, 0.25, 0.25]
    assert found["depth"] == (0.5 * 1 + 0.25 * 2 + 0.25 * 4) / 4
    assert found["ratio"] == 2.0


@torch.inference_mode()
def test_the_last_exit_alone_equals_the_models_last_exit():
    model = tiny_subject().model
    tokens = torch.randint(0, 61, (1, 7))
    last = model(tokens, output_exit_logits=True).exit_logits[..., -1, :].log_softmax(-1)
    torch.testing.assert_close(last_exit_of(model)(tokens).logits.log_softmax(-1), last)
