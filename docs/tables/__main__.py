"""Writes the tables into the pages; `--check` prints pages that differ, and exits with 1."""

import argparse
import sys
from collections.abc import Sequence

from docs.tables import drafts, faults, fields, models, options, results, retrofit, serving, speed, vocabulary
from docs.tables.table import MARKED, ROOT, rendered

MODULES = (speed, serving, results, vocabulary, faults, models, retrofit, drafts, fields, options)
PAGES = ("README.md", "docs", "benchmarks/README.md")


def pages() -> dict[str, str]:
    """Text by name, of all pages with a table."""
    roots = [ROOT / page for page in PAGES]
    paths = [path for root in roots for path in (sorted(root.rglob("*.md")) if root.is_dir() else [root])]
    texts = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in paths}
    return {name: text for name, text in texts.items() if MARKED.search(text)}


def main(arguments: Sequence[str] | None = None) -> int:
    options = argparse.ArgumentParser(prog="python -m docs.tables", description=__doc__)
    options.add_argument("--check", action="store_true")
    asked = options.parse_args(arguments)
    changed = {name: new for name, text in pages().items() if (new := rendered(text)) != text}
    for name, text in changed.items():
        sys.stdout.write(f"{name} differs from benchmarks/\n" if asked.check else f"{name} written\n")
        if not asked.check:
            (ROOT / name).write_text(text, encoding="utf-8")
    return int(asked.check and bool(changed))


if __name__ == "__main__":
    sys.exit(main())
