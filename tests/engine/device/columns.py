"""Sampling parameters of rows as the sampler reads them."""

from collections.abc import Sequence

import numpy as np
import torch

from nvium_core.engine.draw import DRAW, Draw


def columns(draws: Sequence[Draw]) -> dict[str, torch.Tensor]:
    record_R = np.array(draws, DRAW)
    return {name: torch.from_numpy(np.ascontiguousarray(record_R[name])) for name in Draw._fields}
