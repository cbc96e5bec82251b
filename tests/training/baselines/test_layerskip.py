"""LayerSkip's training: which exits count and how much, which layers drop out, and what the loss is made of."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nvium_core.model.llama import causal_attention
from nvium_core.model.nvium import token_nll
from nvium_core.training.baselines.layerskip import LayerSkip, build_layerskip, exit_losses, kept_layers
from nvium_core.training.data.windows import Batch
from tests.training.baselines.small_models import phase, small_batch, small_config, small_layerskip, small_univium

PAPER = LayerSkip()
EARLY = [*range(2, 24, 2)]


def part(batch: Batch, windows: slice) -> Batch:
    return Batch(
        *(getattr(batch, name)[windows] for name in ("inputs", "targets", "positions", "documents", "counted"))
    )


def test_the_model_is_a_llama_that_knows_where_it_is_asked() -> None:
    model = build_layerskip(small_config(num_layers=24, num_exits=12))
    assert model.config.exit_layers == [24]
    assert list(model.early_exits) == EARLY
    assert "exits.0.norm.weight" in model.state_dict() and not any("adapter" in name for name in model.state_dict())


def test_dropout_rises_over_layers_and_time_to_its_maximum() -> None:
    assert PAPER.dropout(24, progress=0.0) == [0.0] * 24
    at_the_end = PAPER.dropout(24, progress=1.0)
    assert at_the_end[0] == 0 and at_the_end[-1] == pytest.approx(0.3)
    assert at_the_end[7] == pytest.approx((math.exp(7 * math.log(2) / 23) - 1) * 0.3)
    half_way = PAPER.dropout(24, progress=0.5)
    assert half_way[-1] == pytest.approx((math.exp(0.5 * math.log(2)) - 1) * 0.3)
    assert half_way == sorted(half_way)


def test_the_gradual_curriculum_lets_exits_in_from_the_deepest_and_has_all_after_half_of_the_steps() -> None:
    def active(progress: float) -> list[int]:
        return PAPER.active(EARLY, 24, phase(progress=progress))

    assert active(0.0) == []
    assert active(2 / 48) == [22]  # two layers, each a 2 L-th of the run
    assert active(0.2499) == [14, 16, 18, 20, 22]
    assert active(0.25) == [12, 14, 16, 18, 20, 22]
    assert active(0.5) == active(0.99) == EARLY


def test_the_rotational_curriculum_asks_one_exit_after_the_other_for_so_many_steps() -> None:
    rotational = LayerSkip(curriculum="rotational", rotation_period=8)
    turns = [rotational.active([2, 4, 6], 8, phase(step, 0.9)) for step in range(0, 32, 8)]
    assert turns == [[2], [4], [6], [2]]
    assert rotational.active([2, 4, 6], 8, phase(15)) == [4]
    assert rotational.active([], 8, phase(15)) == []
    assert rotational.loss_weights([2, 4], phase(3)) == pytest.approx({2: 1 / 7, 4: 6 / 7})


def test_dropout_may_be_the_same_throughout() -> None:
    constant = LayerSkip(dropout_in_time="constant")
    assert constant.dropout(24, progress=0.1) == pytest.approx(PAPER.dropout(24, progress=1.0))


@pytest.mark.parametrize(
    ("setting", "value"), [("curriculum", "steep"), ("dropout_in_time", "linear"), ("rotation_period", 0)]
)
def test_settings_that_mean_nothing_are_named(setting: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{setting} must be"):
        LayerSkip(**{setting: value})  # type: ignore[arg-type]


def test_later_exits_weigh_quadratically_more() -> None:
    weights = PAPER.loss_weights([2, 4], phase(progress=0.9))
    assert weights == pytest.approx({2: 1 / 7, 4: 6 / 7})  # 0 + 1 against 3 + (0 + 1 + 2)
    assert LayerSkip(early_loss_scale=0.5).loss_weights([2, 4], phase(progress=0.9)) == pytest.approx({2: 0.1, 4: 0.9})
    assert LayerSkip(early_loss_scale=0).loss_weights([2, 4], phase(progress=0.9)) == {2: 0, 4: 1}


@given(num_layers=st.integers(1, 48), progress=st.floats(0, 1))
def test_weights_always_sum_to_one(num_layers: int, progress: float) -> None:
    weights = PAPER.loss_weights([*range(2, num_layers, 2), num_layers], phase(progress=progress))
    assert sum(weights.values()) == pytest.approx(1)
    assert max(weights, key=lambda depth: weights[depth]) == num_layers


def test_layers_are_kept_as_often_as_they_should_be() -> None:
    batch, dropout = small_batch(num_windows=50), [0.0, 0.1, 0.3, 0.6]
    kept_LB = torch.cat([kept_layers(batch, step, dropout) for step in range(40)], dim=1)
    assert kept_LB.shape == (4, 2000)
    deviation = 4 * math.sqrt(0.25 / 2000)
    assert (1 - kept_LB.double().mean(1)).tolist() == pytest.approx(dropout, abs=deviation)
    assert kept_LB[0].all()


def test_a_window_drops_the_same_layers_in_passes_of_any_size_and_whatever_was_drawn_before() -> None:
    batch, dropout = small_batch(num_windows=6), [0.5] * 8
    whole = kept_layers(batch, 7, dropout)
    torch.manual_seed(99)
    parts = [kept_layers(part(batch, slice(first, first + 2)), 7, dropout) for first in (0, 2, 4)]
    assert torch.equal(torch.cat(parts, dim=1), whole)
    assert not torch.equal(kept_layers(batch, 8, dropout), whole)
    assert len({tuple(window_L.tolist()) for window_L in whole.T}) > 1


@torch.no_grad()
def test_a_window_passes_a_dropped_layer_unchanged() -> None:
    model, batch = small_univium(), small_batch(num_windows=2)
    kept_LB = torch.tensor([[True, True], [False, True], [True, True], [True, False]])
    losses = exit_losses(model, batch, kept_LB, [2, 4])
    for depth, loss in losses.items():
        per_window = []
        for number in range(2):
            alone = part(batch, slice(number, number + 1))
            layers = [layer for layer in range(depth) if kept_LB[layer, number]]
            rotary = model.model.rotary(alone.positions, torch.float64)
            h_BTD = model.model.embed_tokens(alone.inputs)
            h_BTD = model.model.run(h_BTD, layers, rotary, causal_attention(alone.mask()))
            per_window.append(token_nll(model.lm_head(model.exits[0].norm(h_BTD)), alone.targets).mean())
        torch.testing.assert_close(loss, torch.stack(per_window).mean())


def test_without_dropout_and_early_exits_it_is_the_dense_loss() -> None:
    model, batch = small_layerskip(), small_batch()
    batch.counted[:, ::3] = False
    outcome = PAPER.objective(model, batch, phase(progress=0.0))
    (h_BTD,) = model.hidden_states(batch.inputs, batch.positions, causal_attention(batch.mask()))
    expected = token_nll(model.lm_head(model.exits[0].norm(h_BTD)), batch.targets)[batch.counted].mean()
    torch.testing.assert_close(outcome.loss, expected)
    torch.testing.assert_close(outcome.figures["mix_loss"], expected.detach())
    assert outcome.figures["dropped_share"] == 0


def test_the_loss_is_the_weighted_sum_and_every_weight_learns() -> None:
    model, batch, now = small_layerskip(), small_batch(num_windows=8), phase(step=3, progress=0.9)
    method = LayerSkip(max_dropout=0.6)
    outcome = method.objective(model, batch, now)
    kept_LB = kept_layers(batch, 3, method.dropout(4, 0.9))
    assert 0 < outcome.figures["dropped_share"] == pytest.approx(1 - kept_LB.float().mean())
    losses = exit_losses(model, batch, kept_LB, [2, 4])
    torch.testing.assert_close(outcome.loss, losses[2] / 7 + losses[4] * 6 / 7)
    outcome.loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


@torch.no_grad()
def test_out_of_training_it_is_the_dense_loss() -> None:
    model, batch = small_layerskip().eval(), small_batch(num_windows=8)
    outcome = LayerSkip(max_dropout=0.6).objective(model, batch, phase(step=3, progress=0.9))
    assert outcome.figures["dropped_share"] == 0
    assert outcome.loss == outcome.figures["mix_loss"]
    torch.testing.assert_close(outcome.loss, PAPER.objective(model.train(), batch, phase()).loss)


def test_a_compiled_objective_is_the_same() -> None:
    model, batch, now = small_layerskip(), small_batch(), phase(step=3, progress=0.9)
    compiled = torch.compile(PAPER.objective, dynamic=False, backend="eager")
    assert compiled(model, batch, now).loss == PAPER.objective(model, batch, now).loss


@pytest.mark.parametrize("setting", [{"max_dropout": 1.0}, {"early_loss_scale": 1.5}])
def test_settings_that_make_no_sense_are_refused(setting: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(setting))):
        LayerSkip(**setting)  # type: ignore[arg-type]
