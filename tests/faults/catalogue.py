"""The faults there are."""

import signal
from functools import partial

from tests.faults.cluster import cluster
from tests.faults.divisions import (
    replica_hangs,
    replica_killed,
    replica_slowed,
)
from tests.faults.kinds import (
    FILES,
    Kind,
    break_the_device_thread,
    drops_lines,
    files_at_most,
    fills_its_pipe,
    full_disk,
    logs,
    no_file_may_grow,
    no_more_memory,
    nothing,
    paused,
    pipe_that_nobody_reads,
    pipe_without_reader,
    signalled,
    silent_clients,
    slowed,
    until_it_ends,
)
from tests.faults.reloads import reloaded_again_and_again, with_a_file_of_keys
from tests.faults.surroundings import (
    NEXT_YEAR,
    broken_disk,
    clock_jumps,
    everything_read_only,
    into_a_memory_group,
    no_faketime,
    no_memory_groups,
    no_memory_of_its_group,
    no_root,
    sees_a_read_only_disk,
    was_refused_memory,
    with_a_clock_that_can_jump,
)

TERM, INT, KILL = signal.SIGTERM, signal.SIGINT, signal.SIGKILL

KINDS = [
    Kind(
        "more clients than files",
        silent_clients,
        prepare=partial(files_at_most, FILES),
        is_felt=logs("too many connections"),
        is_quick=True,
    ),
    Kind("log on a full disk", nothing, log=full_disk, is_felt=drops_lines, is_quick=True),
    Kind("log on a broken disk", nothing, log=broken_disk, is_felt=drops_lines),
    Kind("log's reader gone", nothing, log=pipe_without_reader, is_felt=drops_lines),
    Kind("log's reader asleep", nothing, log=pipe_that_nobody_reads, is_felt=fills_its_pipe, is_quick=True),
    Kind("no file may grow", nothing, prepare=no_file_may_grow, is_felt=drops_lines),
    Kind("everything read-only", nothing, prepare=everything_read_only, needs=no_root, is_felt=sees_a_read_only_disk),
    Kind(
        "no more memory", no_more_memory, ends=(1,), may_live=True, may_lose=True, is_felt=lambda _: True, is_quick=True
    ),
    Kind(
        "no memory of its group",
        no_memory_of_its_group,
        ends=(-KILL, 1),
        prepare=into_a_memory_group,
        needs=no_memory_groups,
        is_felt=was_refused_memory,
        may_lose=True,
        may_live=True,
    ),
    Kind("clock jumps", clock_jumps, start=with_a_clock_that_can_jump, needs=no_faketime, is_felt=logs(NEXT_YEAR)),
    Kind("SIGTERM", partial(signalled, TERM), ends=(0,), is_quick=True),
    Kind("SIGINT", partial(signalled, INT), ends=(0,)),
    Kind("SIGKILL", partial(signalled, KILL), ends=(-KILL,), may_lose=True, is_quick=True),
    Kind("SIGHUP, 200 times", reloaded_again_and_again, start=with_a_file_of_keys, is_felt=logs("certificate renewed")),
    Kind("SIGSTOP and SIGCONT", paused, is_quick=True),
    Kind("slowed", slowed),
    Kind("device thread dies", until_it_ends, ends=(1,), prepare=break_the_device_thread, is_quick=True),
    Kind("one of two replicas killed", replica_killed, start=cluster, is_quick=True),
    Kind("one of two replicas stopped and continued", replica_hangs, start=cluster, is_quick=True),
    Kind("one of two replicas slowed", replica_slowed, start=cluster),
    Kind("front terminated", partial(signalled, TERM), ends=(0,), start=cluster),
    Kind("front killed", partial(signalled, KILL), ends=(-KILL,), start=cluster, may_lose=True, is_quick=True),
]
