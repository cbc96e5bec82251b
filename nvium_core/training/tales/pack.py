"""The filtered tales as one file of documents, with counts of what was dropped and why."""

import json
import lzma
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from nvium_core.training.tales.filters import Filter, Reason, simple_words
from nvium_core.training.tales.narrator import Tale
from nvium_core.training.tales.tell import read_shards

SEPARATOR = "\n<|endoftext|>\n"


@dataclass(frozen=True, kw_only=True)
class Packed:
    """Counted in the teller's vocabulary; `num_own_tokens` are those it generated."""

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


def pack_tales(folder: Path, target: Path, words_from: Path) -> Packed:
    """Write the tales that are kept, and their counts as JSON beside them."""
    kept, packed = filtered(read_shards(folder), Filter(simple_words(read_text(words_from))))
    target.write_bytes(
        lzma.compress(SEPARATOR.join(tale.text for tale in kept).encode(), preset=9 | lzma.PRESET_EXTREME)
    )
    target.with_suffix(".json").write_text(json.dumps(asdict(packed), indent=2) + "\n", encoding="utf-8")
    return packed


def filtered(tales: Iterable[Tale], test: Filter) -> tuple[list[Tale], Packed]:
    kept, dropped = list[Tale](), Counter(dict.fromkeys(test.reasons, 0))
    for tale in tales:
        reason = test.reason_against(tale)
        if reason is None:
            kept.append(tale)
        else:
            dropped[reason] += 1
    return kept, Packed(
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
