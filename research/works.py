"""The work of each document of a text, from a table of sources, for `nvium evaluate --works`.

    python -m research.works valid.txt.xz SOURCES.tsv --split valid > works.txt

Chapters of a book stand together, so a run of documents with a work's number of documents and of characters is that
work. Other documents are works of their own.
"""

import csv
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from pathlib import Path

from nvium_core.training.data.documents import read_documents


def works_of(documents: Sequence[str], sources: Sequence[Mapping[str, str]]) -> list[str]:
    """A name for each document."""
    largest_first = sorted(sources, key=lambda source: -int(source["documents"]))
    found = list[str]()
    while len(found) < len(documents):
        start = len(found)
        for source in largest_first:
            run = documents[start : start + int(source["documents"])]
            if len(run) == int(source["documents"]) and sum(map(len, run)) == int(source["characters"]):
                found += [source["title"]] * len(run)
                break
        else:
            found.append(f"document {start + 1}")
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(prog="python -m research.works", description=__doc__.splitlines()[0])
    parser.add_argument("text", type=Path)
    parser.add_argument("sources", type=Path, help="tab-separated, with title, split, characters and documents")
    parser.add_argument("--split", default="valid")
    given = parser.parse_args(arguments)
    with given.sources.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file, delimiter="\t") if row["split"] == given.split]
    print("\n".join(works_of(read_documents(given.text), rows)))


if __name__ == "__main__":
    main()
