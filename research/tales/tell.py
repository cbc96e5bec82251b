"""Write tales in shards, one file each, starting with the first missing shard."""

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from itertools import count
from pathlib import Path
from random import Random

from research.tales.narrator import Narrator, Tale
from research.tales.plots import draw_plot


def tell_tales(
    narrator: Narrator, folder: Path, tales_per_shard: int, say: Callable[[str], None], first: int = 0, every: int = 1
) -> None:
    """Write every `every`-th shard until interrupted. A shard's tales depend only on the shard's number."""
    folder.mkdir(parents=True, exist_ok=True)
    for shard in count(first, every):
        if shard_file(folder, shard).exists():
            continue
        began, cpu_began = time.time(), time.process_time()
        random = Random(shard)
        tales = narrator.tell([draw_plot(random) for _ in range(tales_per_shard)], seed=shard)
        write_shard(folder, shard, tales)
        whole = [tale for tale in tales if tale.is_whole]
        counts = f"{len(whole)} of {len(tales)} whole, {sum(tale.num_tokens for tale in whole):,} tokens"
        say(f"shard {shard}: {counts}, {time.time() - began:.0f} s, CPU {time.process_time() - cpu_began:.0f} s")


def shard_numbers(folder: Path, first: int = 0, last: int | None = None) -> list[int]:
    """List the existing shards from `first` to `last`."""
    numbers = sorted(int(file.stem) for file in folder.glob(f"{'[0-9]' * 6}.jsonl"))
    return [number for number in numbers if first <= number and (last is None or number <= last)]


def shard_file(folder: Path, shard: int) -> Path:
    return folder / f"{shard:06}.jsonl"


def write_shard(folder: Path, shard: int, tales: list[Tale]) -> None:
    lines = "".join(json.dumps(asdict(tale)) + "\n" for tale in tales)
    write_whole(shard_file(folder, shard), lines.encode())


def write_whole(file: Path, content: bytes) -> None:
    """Write a file atomically."""
    scratch = file.with_name(f".{file.name}.{os.getpid()}")
    scratch.write_bytes(content)
    scratch.replace(file)


def read_shards(folder: Path, shards: Iterable[int]) -> Iterator[Tale]:
    for shard in shards:
        for line in shard_file(folder, shard).read_text(encoding="utf-8").splitlines():
            yield Tale(**json.loads(line))
