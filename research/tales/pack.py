"""Write filtered tales as one file of documents, and count the dropped tales by reason."""

import json
import lzma
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from nvium_core.errors import NviumError
from nvium_core.training.data.texts import documents_of
from research.tales.filters import Filter, Reason, simple_words
from research.tales.narrator import Tale
from research.tales.tell import read_shards, shard_file, shard_numbers, write_whole

SEPARATOR = "\n<|endoftext|>\n"


class PackError(NviumError, ValueError):
    """Shards are missing, or cannot be appended to a packed text."""


@dataclass(frozen=True, kw_only=True)
class Packed:
    """Counts of the tales in shards up to `last_shard`. `num_own_tokens` counts tokens that the model generated."""

    last_shard: int
    num_told: int
    num_kept: int
    num_tokens: int
    num_own_tokens: int
    num_words: int
    num_characters: int
    dropped: dict[Reason, int]

    def __str__(self) -> str:
        why = ", ".join(f"{reason} {number:,}" for reason, number in self.dropped.items() if number)
        return f"{self.num_kept:,} of {self.num_told:,} tales, {self.num_tokens:,} tokens; dropped: {why or 'none'}"

    def added_to(self, earlier: "Packed") -> "Packed":
        """Add the counts of an earlier text."""
        sums = {name: getattr(earlier, name) + getattr(self, name) for name in asdict(self) if name.startswith("num_")}
        dropped = Counter(earlier.dropped)
        dropped.update(self.dropped)
        return replace(self, **sums, dropped=dict(dropped))


def pack_tales(
    folder: Path,
    target: Path,
    words_from: Path,
    *,
    first: int = 0,
    last: int | None = None,
    after: Path | None = None,
    unlike: Sequence[Path] = (),
) -> Packed:
    """Filter the shards' tales, append them to the packed text `after`, and write the counts as JSON."""
    begun, counted = read_packed(after) if after else ([], None)
    if counted and first <= counted.last_shard:
        raise PackError(f"{after}: already contains shards up to {counted.last_shard}; pass a higher --first")
    shards = shard_numbers(folder, first, last)
    if not shards:
        raise PackError(f"{folder}: has no shards in this range")
    if missing := sorted(set(range(first, shards[-1])) - set(shards)):
        raise PackError(f"{shard_file(folder, missing[0])}: missing; shards must be packed in order")
    test = Filter(simple_words(read_text(words_from)))
    for text in [*begun, *(text for other in unlike for text in documents_of(other))]:
        test.remember(text)
    kept, packed = filtered(read_shards(folder, shards), test, shards[-1])
    packed = packed.added_to(counted) if counted else packed
    text = SEPARATOR.join([*begun, *(tale.text for tale in kept)])
    write_whole(target, lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))
    write_whole(counts_of(target), f"{json.dumps(asdict(packed), indent=2)}\n".encode())
    return packed


def read_packed(file: Path) -> tuple[list[str], Packed]:
    """Read a packed text and its counts. Raise `PackError` if they do not match."""
    documents = list(documents_of(file))
    try:
        packed = Packed(**json.loads(counts_of(file).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise PackError(f"{counts_of(file)}: {error}") from error
    if packed.num_kept != len(documents):
        misfit = f"counts {packed.num_kept:,} tales, {file.name} has {len(documents):,}"
        raise PackError(f"{counts_of(file)}: {misfit}; restore both from version control")
    return documents, packed


def counts_of(target: Path) -> Path:
    return target.with_suffix(".json")


def filtered(tales: Iterable[Tale], test: Filter, last_shard: int) -> tuple[list[Tale], Packed]:
    kept, dropped = list[Tale](), Counter(dict.fromkeys(test.reasons, 0))
    for tale in tales:
        reason = test.reason_against(tale)
        if reason is None:
            kept.append(tale)
        else:
            dropped[reason] += 1
    return kept, Packed(
        last_shard=last_shard,
        num_told=len(kept) + dropped.total(),
        num_kept=len(kept),
        num_tokens=sum(tale.num_tokens for tale in kept),
        num_own_tokens=sum(tale.num_own for tale in kept),
        num_words=sum(len(tale.text.split()) for tale in kept),
        num_characters=sum(len(tale.text) for tale in kept),
        dropped=dict(dropped),
    )


def read_text(file: Path) -> str:
    if file.suffix == ".xz":
        return lzma.decompress(file.read_bytes()).decode()
    return file.read_text(encoding="utf-8")
