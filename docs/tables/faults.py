"""Injected faults, and a long load over HTTP."""

from docs.tables.table import Table, digits, read, table

COUNTS = ("times", "right", "wrong", "lost", "dropped", "failed", "refused")
HELD = {
    "memory, MB": "resident_mb",
    "threads": "threads",
    "descriptors": "descriptors",
    "preemptions": "preemptions",
    "disconnects": "cancelled",
}


@table
def faults() -> Table:
    told = read("faults")
    head = ["what", *COUNTS, "recovery, s", "took, s", "exit codes"]
    rows = [
        [
            row["what"],
            *(row[name] for name in COUNTS),
            digits(row["recovery_seconds"], 1),
            digits(row["seconds"]),
            row["exit_codes"],
        ]
        for row in told["rows"]
    ]
    sums = [sum(row[name] for row in told["rows"]) for name in COUNTS]
    return head, [*rows, ["together", *sums, None, digits(told["seconds"]), None]]


@table
def upgrade() -> Table:
    names = ("running", "right", "wrong", "lost", "failed", "refused")
    rows = zip(("to this version", "and back"), read("upgrade")["rows"], strict=True)
    head = ["", "running at SIGTERM", *names[1:], "old server's end, s"]
    return head, [[what, *(row[name] for name in names), digits(row["drain_seconds"], 1)] for what, row in rows]


@table
def replica_hangs() -> Table:
    counts = ("requests", "right", "wrong", "failed", "lost", "delayed")
    times = {
        "longest_seconds": "longest, s",
        "excluded_seconds": "excluded after, s",
        "back_seconds": "two again after, s",
    }
    head = ["one of two replicas", *counts, *times.values()]
    rows = read("replica-hangs")["rows"]
    return head, [
        [row["what"], *(row[name] for name in counts), *(digits(row[name], 1) for name in times)] for row in rows
    ]


@table
def fuzzing() -> Table:
    names = ("inputs", "covered_at_first", "covered", "findings")
    head = ["target", "processor, minutes", "inputs", "edges at first", "edges", "findings"]
    rows = read("fuzzing")["rows"]
    return head, [[row["target"], digits(row["processor_minutes"], 1), *(row[name] for name in names)] for row in rows]


@table
def soak_http() -> Table:
    samples = read("soak-http")["samples"]
    head = ["after, s", *HELD, "right so far", "median answer, s"]
    shown = [samples[1], samples[len(samples) // 2], samples[-1]]
    return head, [
        [
            digits(sample["seconds"]),
            *(digits(sample[name], int(name == "resident_mb")) for name in HELD.values()),
            sum(earlier["answers"] for earlier in samples if earlier["seconds"] <= sample["seconds"]),
            digits(sample["p50"], 1),
        ]
        for sample in shown
    ]


@table
def defects() -> Table:
    head = ["what", "tests", "failed before", "could not run", "fail now", "pass now", "mended in"]
    return head, [
        [
            row["what"],
            f"`{row['tests'].rsplit('/', 1)[1]}`",
            row["before"]["failed"],
            row["before"]["error"],
            row["now"]["failed"] + row["now"]["error"],
            row["now"]["passed"],
            f"`{row['commit']}`",
        ]
        for row in read("defects")["rows"]
    ]
