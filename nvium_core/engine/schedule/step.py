"""A Step, which is one call to the device, its outcome, and what runs it. A policy: which blocks a row passes before
its next token is decided. Blocks count from 0. Torch-free."""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from nvium_core.choices import Schedule
from nvium_core.engine.config import EngineConfig
from nvium_core.engine.events import Score, StepReport
from nvium_core.engine.schedule.sequence import Sequence

NO_TOKEN = -1  # result of sampling if the logits have NaN or infinities

MAX_SHORT_RUN_ROWS = 16
"""A run of more rows, such as a prompt, is *long*."""


class Run(NamedTuple):
    """One sequence's part of a Step: rows filled[k] … stop - 1 of each block k.

    In a tied Step, block k has only rows that earlier Steps have passed through block k - 1. So the blocks have
    different rows, and a row moves by at most one block.
    """

    sequence: Sequence
    stop: int

    def rows(self, block: int, filled: Items[int], *, is_tied: bool) -> range:
        """Return the rows of a block, possibly none. `filled`: the staircase before the Step or, if not tied, now."""
        return range(filled[block], min(self.stop, filled[block - 1]) if is_tied and block else self.stop)

    @property
    def reaches_front(self) -> bool:
        return self.stop == self.sequence.num_tokens


class Rows(NamedTuple):
    """Consecutive rows of one sequence."""

    sequence: Sequence
    rows: range


class Policy(NamedTuple):
    """`passes` cuts consecutive blocks into passes. After each pass, front rows may emit their tokens.

    `ready_block`: (sequence, whether others wait for its pages) → the first block of the pass that it waits for.
    `allows_async`: whether a Step, always of all blocks, may be scheduled before the last one's outcomes are known.
    `is_tied`: whether each row passes at most one block of a pass. Then the pass runs all blocks at once.
    """

    name: Schedule
    passes: Callable[[range], list[range]]
    ready_block: Callable[[Sequence, bool], int]
    allows_async: bool
    is_tied: bool = False


WHOLE = Policy("whole", lambda blocks: [blocks], lambda sequence, is_leader: 0, allows_async=True)
"""Runs all blocks for every row."""

SWEEP = Policy(
    "sweep",
    lambda blocks: [range(block, block + 1) for block in blocks],
    lambda sequence, is_leader: sequence.deepest_pending_block if is_leader else sequence.ready_block,
    allows_async=False,
)
"""The paper's loop with batching: runs the deepest block for which enough sequences wait, also for deferred rows."""

TIED = Policy("sweep", lambda blocks: [blocks], lambda sequence, is_leader: 0, allows_async=False, is_tied=True)
"""The sweep of a model whose blocks share their weights: one read of the weights serves rows of every block."""


@dataclass(frozen=True, slots=True)
class Step:
    """Rows of some sequences to run through these blocks, in the passes of a policy.

    A run ends with the pass in which its front row emits its last token, of at most `limit`. After `seconds`, no run
    starts another token. `async_rows`: the rows of the next Step, which a backend may run before it returns this
    Step's outcomes. A row behind the last known token takes the token that its sequence emits in this Step.
    `is_typical`: whether tuners count the Step.
    """

    blocks: range
    runs: list[Run]
    policy: Policy = SWEEP
    limit: int = 1
    seconds: float = 0.0
    async_rows: Items[Rows] = ()
    is_typical: bool = True


class Emission(NamedTuple):
    """An emitted token, its exit (0-based) and log p_k of that exit."""

    token_id: int
    block: int
    log_p: float


@dataclass(slots=True)
class Outcome:
    """Outcome of a run. If `error` is set, the other fields are meaningless.

    `filled`: the new staircase. `log_reached`: log Π (1 − w_j) over the exits that the front row has passed; 0 if it
    has just emitted. `scores`: scores of the rows that have passed the last block in this Step.
    """

    filled: list[int]
    log_reached: float = 0.0
    emissions: list[Emission] = field(default_factory=list)
    scores: Items[Score] = ()
    error: Exception | None = None


class StepResult(NamedTuple):
    """Outcomes in the order of the Step's runs."""

    outcomes: list[Outcome]
    reports: list[StepReport]


def likely_fastest(policies: Items[Policy], num_sequences: int) -> int:
    """Return the index of the policy to run before any is measured.

    One sequence gains from reading fewer weights. Several wait for each other's blocks, unless one pass serves all.
    """
    return len(policies) - 1 if num_sequences == 1 or policies[-1].is_tied else 0


def policies_of(schedule: Schedule, num_blocks: int, *, is_tied: bool = False) -> tuple[Policy, ...]:
    """Return the policies that a schedule compares, the baseline first. `is_tied`: blocks share their weights."""
    sweep = TIED if is_tied else SWEEP
    raced: dict[Schedule, tuple[Policy, ...]] = {"race": (WHOLE, sweep), "whole": (WHOLE,), "sweep": (sweep,)}
    return raced[schedule] if num_blocks > 1 else (WHOLE,)


class Backend(Protocol):
    """Runs Steps on a device."""

    num_multi_steps: int = 0
    """Maximum tokens per sequence that one call may emit without drafts. 0 means one token."""

    async_scheduling: bool = False
    """Whether the device may run `Step.async_rows` while the host waits for the Step."""

    eager_passes: Mapping[str, int] = {}
    """Number of passes that ran in PyTorch's operators, by the cause."""

    @property
    def instructions(self) -> str | None:
        """Instruction set of the native kernels, "graphs" for CUDA graphs, or None."""
        return None

    def prepare(self, config: EngineConfig) -> None:
        """Compile or capture what Steps need. Called before the first Step."""
        return

    def run(self, step: Step, max_rows: int) -> StepResult:
        """Run a Step's rows through its blocks, decide which front rows emit, and score rows.

        If `run` raises, it must not have changed anything that a retry reads. It stops before a pass with more than
        `max_rows` rows, unless it is the first.
        """
        ...
