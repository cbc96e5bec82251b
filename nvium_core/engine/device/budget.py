"""How long measuring may take: nothing is begun that is not expected to end in time."""

import math
import time


class Budget:
    """Seconds from now on; without a number there is no end of them."""

    def __init__(self, seconds: float = math.inf) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        return self._end - time.monotonic()

    def allows(self, seconds: float) -> bool:
        """Whether something may be begun that takes about so long."""
        return seconds <= self.left

    def share(self, part: float) -> "Budget":
        """A part of what is left."""
        return Budget(max(0.0, self.left) * part)
