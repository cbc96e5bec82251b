"""All faults."""

import signal
from functools import partial

from tests.faults.cluster import cluster
from tests.faults.divisions import replica_hangs, replica_killed, replica_slowed
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
from tests.faults.reloads import reload_keys, server_with_key_file
from tests.faults.surroundings import (
    NEXT_YEAR,
    broken_disk,
    clock_jumps,
    has_read_only_root,
    hit_memory_limit,
    join_memory_group,
    limit_memory_group,
    missing_faketime,
    missing_memory_groups,
    missing_root,
    mount_read_only,
    server_with_fake_clock,
)

TERM, INT, KILL = signal.SIGTERM, signal.SIGINT, signal.SIGKILL

KINDS = [
    Kind(
        "more clients than files",
        silent_clients,
        prepare=partial(files_at_most, FILES),
        had_effect=logs("too many connections"),
        is_quick=True,
    ),
    Kind("log on a full disk", nothing, log=full_disk, had_effect=drops_lines, is_quick=True),
    Kind("log on a broken disk", nothing, log=broken_disk, had_effect=drops_lines),
    Kind("log's reader gone", nothing, log=pipe_without_reader, had_effect=drops_lines),
    Kind("log's reader asleep", nothing, log=pipe_that_nobody_reads, had_effect=fills_its_pipe, is_quick=True),
    Kind("no file may grow", nothing, prepare=no_file_may_grow, had_effect=drops_lines),
    Kind("everything read-only", nothing, prepare=mount_read_only, missing=missing_root, had_effect=has_read_only_root),
    Kind(
        "no more memory",
        no_more_memory,
        ends=(1,),
        may_live=True,
        may_lose=True,
        had_effect=lambda _: True,
        is_quick=True,
    ),
    Kind(
        "no memory of its group",
        limit_memory_group,
        ends=(-KILL, 1),
        prepare=join_memory_group,
        missing=missing_memory_groups,
        had_effect=hit_memory_limit,
        may_lose=True,
        may_live=True,
    ),
    Kind(
        "clock jumps", clock_jumps, start=server_with_fake_clock, missing=missing_faketime, had_effect=logs(NEXT_YEAR)
    ),
    Kind("SIGTERM", partial(signalled, TERM), ends=(0,), is_quick=True),
    Kind("SIGINT", partial(signalled, INT), ends=(0,)),
    Kind("SIGKILL", partial(signalled, KILL), ends=(-KILL,), may_lose=True, is_quick=True),
    Kind("SIGHUP, 200 times", reload_keys, start=server_with_key_file, had_effect=logs("reloaded keys")),
    Kind("SIGSTOP and SIGCONT", paused, is_quick=True),
    Kind("slowed", slowed),
    Kind("device thread dies", until_it_ends, ends=(1,), prepare=break_the_device_thread, is_quick=True),
    Kind("one of two replicas killed", replica_killed, start=cluster, is_quick=True),
    Kind("one of two replicas stopped and continued", replica_hangs, start=cluster, is_quick=True),
    Kind("one of two replicas slowed", replica_slowed, start=cluster),
    Kind("gateway terminated", partial(signalled, TERM), ends=(0,), start=cluster),
    Kind("gateway killed", partial(signalled, KILL), ends=(-KILL,), start=cluster, may_lose=True, is_quick=True),
]
