"""Print the literary work of each document of a text, for `research.paper.vocabulary --works`.

    python -m research.stories.works valid.txt.xz SOURCES.tsv --split valid > works.txt

The chapters of a book are adjacent. So consecutive documents belong to a source if their number and their total length
are those of the source. Every other document counts as a work of its own.
"""

import csv
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from pathlib import Path

from nvium_core.training.data.texts import documents_of


def works_of(documents: Sequence[str], sources: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the title of each document's work."""
    largest_first = sorted(sources, key=lambda source: -int(source["documents"]))
    works = list[str]()
    while len(works) < len(documents):
        start = len(works)
        for source in largest_first:
            run = documents[start : start + int(source["documents"])]
            if len(run) == int(source["documents"]) and sum(map(len, run)) == int(source["characters"]):
                works += [source["title"]] * len(run)
                break
        else:
            works.append(f"document {start + 1}")
    return works


def main(arguments: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(prog="python -m research.stories.works", description=__doc__.splitlines()[0])
    parser.add_argument("text", type=Path)
    parser.add_argument("sources", type=Path, help="tab-separated: title, split, characters, documents")
    parser.add_argument("--split", default="valid")
    args = parser.parse_args(arguments)
    with args.sources.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file, delimiter="\t") if row["split"] == args.split]
    print("\n".join(works_of(list(documents_of(args.text)), rows)))


if __name__ == "__main__":
    main()
