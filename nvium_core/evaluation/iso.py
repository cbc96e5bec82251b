"""Which dense model costs as much as an N-vium: in training (isoFLOP), and per spoken token (isoSpeed)."""

from collections.abc import Mapping

import numpy as np

from nvium_core.evaluation.predictions import EvaluationError


def iso_flop_tokens(flops: float, dense_flops: float, num_tokens: float) -> float:
    """The training tokens that cost a dense model what `num_tokens` cost ours: D_dense = F / F_dense · D. The unit of
    tokens is the caller's; steps of equal size do as well."""
    return flops / dense_flops * num_tokens


def iso_speed_layers(dense_milliseconds: Mapping[int, float], milliseconds: float) -> float:
    """The depth, in layers, at which a dense model takes `milliseconds` a token, from times measured at other depths.

    A straight line is laid through the measured points, since a token's time grows by the same with every layer.
    """
    if len(dense_milliseconds) < 2:
        raise EvaluationError("the dense depth of equal speed needs times measured at two depths or more")
    per_layer, fixed = np.polyfit(list(dense_milliseconds), list(dense_milliseconds.values()), 1)
    return float((milliseconds - fixed) / per_layer)
