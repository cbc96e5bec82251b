"""Writes tales in shards, one file each; continues with the first missing shard."""

import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import count
from pathlib import Path
from random import Random

from nvium_core.training.tales.narrator import Narrator, Tale
from nvium_core.training.tales.plots import draw_plot


def tell_tales(narrator: Narrator, folder: Path, tales_per_shard: int, say: Callable[[str], None]) -> None:
    """Until interrupted. A shard's tales depend on its number only."""
    folder.mkdir(parents=True, exist_ok=True)
    for shard in missing_shards(folder):
        began, cpu_began = time.time(), time.process_time()
        random = Random(shard)
        tales = narrator.tell([draw_plot(random) for _ in range(tales_per_shard)], seed=shard)
        write_shard(folder, shard, tales)
        whole = [tale for tale in tales if tale.is_whole]
        told = f"{len(whole)} of {len(tales)} whole, {sum(tale.num_tokens for tale in whole):,} tokens"
        say(f"shard {shard}: {told}, {time.time() - began:.0f} s, CPU {time.process_time() - cpu_began:.0f} s")


def missing_shards(folder: Path) -> Iterator[int]:
    return (shard for shard in count() if not shard_file(folder, shard).exists())


def shard_file(folder: Path, shard: int) -> Path:
    return folder / f"{shard:06}.jsonl"


def write_shard(folder: Path, shard: int, tales: list[Tale]) -> None:
    lines = "".join(json.dumps(asdict(tale)) + "\n" for tale in tales)
    scratch = folder / f".{shard:06}.{os.getpid()}"
    scratch.write_text(lines, encoding="utf-8")
    scratch.replace(shard_file(folder, shard))


def read_shards(folder: Path) -> Iterator[Tale]:
    for file in sorted(folder.glob("*.jsonl")):
        for line in file.read_text(encoding="utf-8").splitlines():
            yield Tale(**json.loads(line))
