"""Write the tables into the pages; with `--check`, print stale pages and exit with 1."""

import argparse
import sys
from collections.abc import Sequence

from docs.tables import fields, options
from docs.tables.table import MARKED, ROOT, rendered

MODULES = (fields, options)


def pages() -> dict[str, str]:
    """The text of every page with a table, by its path."""
    texts = {
        str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md"))
    }
    return {name: text for name, text in texts.items() if MARKED.search(text)}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m docs.tables", description=__doc__)
    parser.add_argument("--check", action="store_true")
    check_only = parser.parse_args(arguments).check
    stale = {name: new for name, text in pages().items() if (new := rendered(text)) != text}
    for name, text in stale.items():
        sys.stdout.write(f"{name} is stale\n" if check_only else f"{name} written\n")
        if not check_only:
            (ROOT / name).write_text(text, encoding="utf-8")
    return int(check_only and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
