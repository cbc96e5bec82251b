"""The faults there are."""

import signal
from functools import partial

from tests.faults.cluster import cluster
from tests.faults.divisions import (
    engine_killed,
    engine_paused,
    replica_cut_off,
    replica_hangs,
    replica_killed,
    replica_slowed,
)
from tests.faults.kinds import (
    FILES,
    Kind,
    break_the_device_thread,
    files_at_most,
    full_disk,
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
from tests.faults.surroundings import (
    broken_disk,
    clock_jumps,
    everything_read_only,
    into_a_memory_group,
    no_faketime,
    no_memory_groups,
    no_memory_of_its_group,
    no_networks,
    no_root,
    with_a_clock_that_can_jump,
)

TERM, INT, KILL = signal.SIGTERM, signal.SIGINT, signal.SIGKILL
PROCESS = {"engine_process": 1}
DIVIDED = {"is_divided": True}

KINDS = [
    Kind("more clients than files", silent_clients, prepare=partial(files_at_most, FILES), is_quick=True),
    Kind("log on a full disk", nothing, log=full_disk, is_quick=True),
    Kind("log on a broken disk", nothing, log=broken_disk),
    Kind("log's reader gone", nothing, log=pipe_without_reader),
    Kind("log's reader asleep", nothing, log=pipe_that_nobody_reads),
    Kind("no file may grow", nothing, prepare=no_file_may_grow),
    Kind("everything read-only", nothing, prepare=everything_read_only, needs=no_root),
    Kind("no more memory", no_more_memory, ends=(1,), may_live=True),
    Kind(
        "no memory of its group",
        no_memory_of_its_group,
        ends=(-KILL, 1),
        prepare=into_a_memory_group,
        needs=no_memory_groups,
        may_live=True,
    ),
    Kind("clock jumps", clock_jumps, start=with_a_clock_that_can_jump, needs=no_faketime),
    Kind("SIGTERM", partial(signalled, TERM), ends=(0,), is_quick=True),
    Kind("SIGINT", partial(signalled, INT), ends=(0,)),
    Kind("SIGKILL", partial(signalled, KILL), ends=(-KILL,), is_quick=True),
    Kind("SIGSTOP and SIGCONT", paused, is_quick=True),
    Kind("slowed", slowed),
    Kind("device thread dies", until_it_ends, ends=(1,), prepare=break_the_device_thread, is_quick=True),
    Kind("SIGTERM, engine's process", partial(signalled, TERM), ends=(0,), options=PROCESS),
    Kind("engine's process killed", engine_killed, ends=(1,), options=PROCESS, is_quick=True),
    Kind("engine's process stopped and continued", engine_paused, options=PROCESS),
    Kind("one of two replicas killed", replica_killed, start=cluster, is_quick=True),
    Kind("one of two replicas stopped and continued", replica_hangs, start=cluster),
    Kind("one of two replicas slowed", replica_slowed, start=cluster),
    Kind("one of two replicas cut off", replica_cut_off, start=cluster, options=DIVIDED, needs=no_networks),
    Kind("front terminated", partial(signalled, TERM), ends=(0,), start=cluster),
    Kind("front killed", partial(signalled, KILL), ends=(-KILL,), start=cluster),
]
