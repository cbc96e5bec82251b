"""Predictions of a single window."""

from collections.abc import Sequence

from nvium_core.evaluation.predictions import Predictions, Window, empty_predictions, predict_window
from nvium_core.model.nvium import Nvium


def window_predictions(model: Nvium, token_ids: Sequence[int], first_target: int) -> Predictions:
    """Predict the targets token_ids[first_target:]."""
    found = empty_predictions(len(token_ids) - first_target, model.config.num_exits)
    predict_window(model, Window(0, list(token_ids), first_target), found, 0)
    return found
