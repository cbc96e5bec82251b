"""How many threads take part in a native call. A row's results do not depend on it."""

from dataclasses import dataclass

import torch

FEW_ROWS = 4


@dataclass
class Threads:
    """For calls of few rows, and of more."""

    few: int
    many: int

    @classmethod
    def all(cls) -> "Threads":
        """As many as PyTorch takes, for every call."""
        return cls(torch.get_num_threads(), torch.get_num_threads())

    def of(self, num_rows: int) -> int:
        return self.few if num_rows <= FEW_ROWS else self.many
