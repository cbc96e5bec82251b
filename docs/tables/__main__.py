"""Write the tables into the pages."""

import sys

from docs.tables import fields
from docs.tables.table import ROOT, rendered

MODULES = (fields,)
"""Importing it registers the tables."""

PAGES = sorted((ROOT / "docs").glob("*.md"))


def main() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        if (new := rendered(text)) != text:
            page.write_text(new, encoding="utf-8")
            sys.stdout.write(f"{page.name} written\n")


if __name__ == "__main__":
    main()
