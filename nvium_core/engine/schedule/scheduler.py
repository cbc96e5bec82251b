"""Admission, the choice of the next Step, and preemption when pages run out. Torch-free.

A run of many rows is *long*: a prompt, or many deferred rows. Long runs would stall the others, so beside short runs
they share a small part of a Step's rows, and only every other Step has any.
"""

from bisect import insort
from collections.abc import Iterable, Iterator
from operator import attrgetter

from nvium_core.engine.params import EngineConfig
from nvium_core.engine.schedule.drafting import Drafting
from nvium_core.engine.schedule.kv_cache import PagePool
from nvium_core.engine.schedule.policies import Policy
from nvium_core.engine.schedule.sequence import DRAFTER, Sequence
from nvium_core.engine.schedule.step import REACHES_FRONT, Run, Step
from nvium_core.engine.schedule.waiting_line import WaitingLine

MAX_SHORT_RUN = 16
"""Rows beyond which a run is long."""


class Scheduler:
    """Sequences wait in turn, run, and leave; older running sequences take precedence.

    Preempted ones wait again and are recomputed.
    """

    def __init__(
        self,
        policy: Policy,
        pool: PagePool,
        config: EngineConfig,
        *,
        num_blocks: int,
        drafting: Drafting | None = None,
    ) -> None:
        """Without `drafting` nothing is drafted."""
        self.policy = policy
        self.drafting = drafting or Drafting.never()
        self.pool = pool
        self.config = config
        self.num_blocks = num_blocks
        self.waiting = WaitingLine()
        self.running: list[Sequence] = []
        self.admitted: list[Sequence] = []
        """Sequences admitted by the last schedule()."""
        self.num_preemptions = 0
        self.grows_early = False
        """Sequences get the next page a token before they need it: for devices that launch passes ahead."""
        self._seats = list(range(config.max_sequences - 1, -1, -1))
        self._plan = 0, 0
        """In the Step that is being made: the block behind which tokens are drafted, or `DRAFTER`, and how many in a
        row at most."""
        self._num_steps = 0
        self._long_ran = False
        self._last_pass: Step | None = None
        """The last Step, if all that run passed every block in it."""

    def add(self, sequence: Sequence) -> None:
        self.waiting.add(sequence)

    def schedule(self) -> Step | None:
        """The next Step, or None when there is nothing to do."""
        self.admitted = list(self._admit()) if self.waiting and self._seats else []
        self._plan = self.drafting.plan(len(self.running))
        if self._last_pass is not None and (step := self._next_pass(self._last_pass)):
            return self._note(step, set())
        while self.running:
            ready = {sequence: self._ready_block(sequence) for sequence in self.running}
            long = {sequence for sequence, block in ready.items() if is_long(sequence, block)}
            block = self._choose(ready, long)
            if runs := list(self._runs(block, ready, long)):
                return self._note(self._with_following(block, runs), long)
        return None

    def remove(self, sequence: Sequence) -> None:
        """Remove a finished, cancelled or failed sequence."""
        sequence.siblings.remove(sequence)
        if sequence.seat is None:
            self.waiting.remove(sequence)
        else:
            self._vacate(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Take a sequence's pages and requeue it at the front."""
        self._vacate(sequence)
        sequence.reset()
        self.waiting.put_back(sequence)
        self.num_preemptions += 1

    def prefills_for_others(self, sequence: Sequence) -> bool:
        """Other choices of its request wait to share the prompt's pages that it is to complete."""
        if len(sequence.siblings) == 1 or sequence.siblings[0] is not sequence or not self.pool.keeps_pages:
            return False
        return sequence.filled[-1] < self.pool.num_rows_in_full_pages(sequence.num_prompt_tokens - 1)

    def check_integrity(self) -> None:
        """Assert that pages and seats are each accounted for once, and that every staircase is one."""
        self.pool.check_integrity(self.running)
        seats = [*self._seats, *(sequence.seat for sequence in self.running)]
        assert len(seats) == self.config.max_sequences == len({*seats}), "a seat is leaked or taken twice"
        assert not any(sequence.pages or sequence.seat is not None for sequence in self.waiting)
        assert len({*self.waiting}) == len(self.waiting) == len(list(self.waiting)), "a sequence waits twice"
        for sequence in self.running:
            stairs = [sequence.num_rows, *sequence.filled]
            assert stairs == sorted(stairs, reverse=True), "the staircase is not monotone"
            assert len(sequence.pages) >= self.pool.num_pages_for(sequence.filled[0])

    def _admit(self) -> Iterator[Sequence]:
        """Admit waiting sequences while there are seats, and pages for all tokens and one more page each."""
        promised = self._num_promised_pages()
        while self._seats and (sequence := self.waiting.first(self._is_held)):
            found = self.pool.find(sequence)
            missing = self._missing_pages(sequence, len(found))
            if promised + missing > self.pool.num_free_without(found):
                return
            promised += 1 + missing
            self._seat(sequence, found)
            yield sequence

    def _missing_pages(self, sequence: Sequence, num_pages: int) -> int:
        """Pages it needs for all its tokens, beyond so many; below 0 where it has pages for later ones."""
        return self.pool.num_pages_for(sequence.num_tokens) - num_pages

    def _num_promised_pages(self) -> int:
        """What running sequences may still take: pages for all their tokens and one more page each."""
        return sum(max(0, 1 + self._missing_pages(sequence, len(sequence.pages))) for sequence in self.running)

    def _seat(self, sequence: Sequence, found: list[int]) -> None:
        self.waiting.take(sequence)
        self.pool.share(sequence, found)
        sequence.note_admission()
        sequence.seat = self._seats.pop()
        sequence.last_step = self._num_steps
        self._last_pass = None
        insort(self.running, sequence, key=attrgetter("arrival"))

    def _is_held(self, sequence: Sequence) -> bool:
        """It waits to share the pages of a prompt that another choice of its request is completing."""
        leader = sequence.siblings[0]
        return leader is not sequence and self.prefills_for_others(leader)

    def _ready_block(self, sequence: Sequence) -> int:
        if sequence.must_catch_up or (len(sequence.siblings) > 1 and self.prefills_for_others(sequence)):
            return sequence.deepest_pending_block
        return self.policy.ready_block(sequence)

    def _choose(self, ready: dict[Sequence, int], long: set[Sequence]) -> int:
        """The policy's choice, unless a sequence is overdue. Long runs count every other time."""
        longest_waiting = min(self.running, key=attrgetter("last_step"))
        if self._is_overdue(longest_waiting):
            return ready[longest_waiting]
        counted = list(ready.values())
        if self._long_ran:
            counted = [block for sequence, block in ready.items() if sequence not in long] or counted
        return self.policy.choose([counted.count(block) for block in range(self.num_blocks)])

    def _is_overdue(self, sequence: Sequence) -> bool:
        return self._num_steps - sequence.last_step >= self.config.max_wait_steps

    def _runs(self, block: int, ready: dict[Sequence, int], long: set[Sequence]) -> Iterator[Run]:
        """Pending rows of ready sequences, within the row budget and the available pages."""
        rows_left = chunk_left = self.config.max_rows_per_step
        if len(long) < len(ready):
            chunk_left = min(chunk_left, self.config.chunk_rows)
        granted: set[Sequence] = set()
        page_size = self.pool.page_size
        for sequence in self._in_turn(block, ready, long):
            is_chunk = sequence in long
            rows = sequence.pending_rows(block)
            if is_chunk or len(rows) > rows_left:
                rows = rows[: min(rows_left, chunk_left) if is_chunk else rows_left]
            has_room = rows.stop <= len(sequence.pages) * page_size
            if rows and sequence.seat is not None and (has_room or self._make_room(sequence, rows.stop, granted)):
                rows_left -= len(rows)
                chunk_left -= len(rows) if is_chunk else 0
                granted.add(sequence)
                yield Run(sequence, rows, self._is_asked(sequence, block, rows))

    def _is_asked(self, sequence: Sequence, block: int, rows: range) -> bool:
        """Whether anything is decided behind the block: `Run.reaches_front`."""
        if sequence.is_original and block == self.num_blocks - 1:
            return bool(sequence.rows_to_verify(rows))
        reaches = rows.stop == len(sequence.token_ids)
        return reaches and (not sequence.is_original or (block == self._plan[0] and self._drafts(sequence)))

    def _drafts(self, sequence: Sequence) -> bool:
        """Whether its front row is to draft a token at the planned exit."""
        return len(sequence.drafted_at) < self._plan[1] and sequence.may_draft and not sequence.is_copying

    def _next_pass(self, last: Step) -> Step | None:
        """The rows after those of a pass, so that everybody is not asked anew where they stand: none unless each
        sequence has emitted a token, is not over and owes nothing."""
        if not self._passes_whole():
            return None
        runs, full, is_plain, page_size, num_rows = list[Run](), list[Sequence](), True, self.pool.page_size, 0
        for sequence, _, _ in last.runs:
            filled = sequence.filled
            front, stop = filled[0], len(sequence.token_ids)
            is_even = front == filled[-1] == stop - len(sequence.drafted_at) - 1
            if not is_even or sequence.finish_reason is not None or (sequence.needs_scores and sequence.owes_scores):
                return None
            if stop >= len(sequence.pages) * page_size:
                full.append(sequence)
            rows, is_asked, num_rows = range(front, stop), True, num_rows + stop - front
            if sequence.is_original:
                is_plain, is_asked = False, self._is_asked(sequence, 0, rows)
            runs.append(Run(sequence, rows, is_asked))
        if num_rows > self.config.max_rows_per_step or (full and not self._grow(full)):  # it may with drafts
            return None
        if not is_plain:
            return self._with_following(0, runs)
        return pass_of(runs, self.num_blocks, repeats=last.repeats or False not in map(REACHES_FRONT, last.runs))

    def _grow(self, sequences: list[Sequence]) -> bool:
        """Pages for all tokens of these, whose pages are full or too few; False if there are none."""
        if False in [self.pool.grow(sequence, sequence.num_tokens) for sequence in sequences]:
            return False
        if self.grows_early:
            self._grow_early(sequences)
        return True

    def _with_following(self, block: int, runs: list[Run]) -> Step:
        """A pass takes the rows through all later blocks, each with the rows that waited there; and a lone sequence's
        next Steps are known but for whether its front goes on. A draft ends a pass."""
        originals = [run.sequence for run in runs if run.sequence.is_original]
        drafts = block <= self._plan[0] and True in [self._drafts(sequence) for sequence in originals]
        is_pass = not drafts and self._passes_whole()
        if not (is_pass or self._is_lone(runs)):
            return Step(block, runs)
        following: Step | None = None
        runs_there, goes_on_anyway = runs, is_pass or bool(originals)
        is_deferred = bool(originals) or True in [run.sequence.filled[-1] < run.rows.start for run in runs]
        for later in range(self._plan[0] if drafts else self.num_blocks - 1, block, -1):
            if is_deferred:
                runs_there = [self._run_there(run, later) for run in runs]
            step = Step(later, runs_there, following, goes_on_anyway)
            following = step if step.num_rows <= self.config.max_rows_per_step else None
        return Step(block, runs, following, goes_on_anyway)

    def _passes_whole(self) -> bool:
        running = self.running
        if self.policy.passes_whole(len(running)):
            return True
        return self.policy.passes_scored and len(running) > 1 and False not in [each.needs_scores for each in running]

    def _run_there(self, run: Run, block: int) -> Run:
        """As it will be at a later block."""
        rows = range(run.sequence.filled[block], run.rows.stop)
        return Run(run.sequence, rows, self._is_asked(run.sequence, block, rows))

    def _is_lone(self, runs: list[Run]) -> bool:
        """A single running sequence, which no admission can join, about to emit."""
        may_be_joined = len(self.running) > 1 or (self.waiting and self._seats)
        return not may_be_joined and runs[0].rows.stop == len(runs[0].sequence.token_ids)

    def _in_turn(self, block: int, ready: dict[Sequence, int], long: set[Sequence]) -> list[Sequence]:
        """Overdue ones, then short runs, those that waited longest first, then long ones, the older first."""
        here = [sequence for sequence, ready_block in ready.items() if ready_block == block]
        here.sort(key=attrgetter("last_step"))
        if not long:
            return here

        def turn(sequence: Sequence) -> tuple[bool, bool, int]:
            if self._is_overdue(sequence):
                return False, False, sequence.last_step
            return True, sequence in long, sequence.arrival if sequence in long else sequence.last_step

        return sorted(here, key=turn)

    def _make_room(self, sequence: Sequence, num_positions: int, granted: set[Sequence]) -> bool:
        """Pages for the first `num_positions`, preempting the youngest if need be; False if it must wait itself."""
        while not self.pool.grow(sequence, num_positions):
            victim = next((s for s in reversed(self.running) if s not in granted), sequence)
            self.preempt(victim)
            if victim is sequence:
                return False
        return True

    def _grow_early(self, sequences: Iterable[Sequence]) -> None:
        """The next page of those whose pages are full, each from what it was promised, unless promises exceed what is
        free; not where no further row may follow."""
        full = [s for s in sequences if s.num_tokens == len(s.pages) * self.pool.page_size]
        if full and self._num_promised_pages() <= self.pool.num_free:
            for sequence in full:
                if sequence.num_tokens + 1 < sequence.max_length:
                    self.pool.grow(sequence, sequence.num_tokens + 1)

    def _note(self, step: Step, long: set[Sequence]) -> Step:
        self._num_steps = num_steps = self._num_steps + 1
        self._long_ran = bool(long) and any(run.sequence in long for run in step.runs)
        for run in step.runs:
            run.sequence.last_step = num_steps
        drafting, most = self._plan
        if most and drafting == DRAFTER:
            step.last.num_drafts = most
        if self.grows_early and not step.repeats:
            self._grow_early(run.sequence for run in step.runs if run.rows.stop == run.sequence.num_tokens)
        is_everybodys = step.goes_on_anyway and step.block == 0 and len(step.runs) == len(self.running)
        self._last_pass = step if is_everybodys else None
        return step

    def _vacate(self, sequence: Sequence) -> None:
        assert sequence.seat is not None
        self._last_pass = None
        self.running.remove(sequence)
        self.pool.release(sequence)
        self._seats.append(sequence.seat)
        sequence.seat = None


def pass_of(runs: list[Run], num_blocks: int, *, repeats: bool = False) -> Step:
    """The same rows through every block."""
    step = Step(num_blocks - 1, runs, None, goes_on_anyway=True)
    for block in range(num_blocks - 2, -1, -1):
        step = Step(block, runs, step, goes_on_anyway=True)
    step.repeats = repeats
    return step


def is_long(sequence: Sequence, block: int) -> bool:
    """More rows wait for this block than a short run has."""
    return sequence.num_pending_rows(block) > MAX_SHORT_RUN
