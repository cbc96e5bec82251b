"""Extracts code blocks, inline code and links from the pages."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parent.parent.parent
PAGES = (
    "README.md",
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").rglob("*.md"))),
    "benchmarks/README.md",
    "benchmarks/vocabulary.md",
    "data/tales/README.md",
    "tests/conformance/README.md",
    "nvium_core/checkpoints/stories-24m/README.md",
)


class Code(NamedTuple):
    place: str
    """Page and line, from 1."""

    text: str

    @property
    def is_python(self) -> bool:
        """True if it parses as Python and has an import."""
        try:
            nodes = ast.parse(self.text).body
        except SyntaxError:
            return False
        return any(isinstance(node, ast.Import | ast.ImportFrom) for node in nodes)


def tokens(page: str) -> list[Token]:
    return MarkdownIt().enable("table").parse((ROOT / page).read_text(encoding="utf-8"))


def blocks(page: str) -> Iterator[Code]:
    for token in tokens(page):
        if token.type in ("code_block", "fence"):
            assert token.map
            yield Code(f"{page}:{token.map[0] + 1}", token.content)


def _inline(page: str) -> Iterator[tuple[int, Token]]:
    for token in tokens(page):
        for child in token.children or ():
            yield (token.map or [0])[0] + 1, child


def spans(page: str) -> Iterator[Code]:
    for line, token in _inline(page):
        if token.type == "code_inline":
            yield Code(f"{page}:{line}", token.content)


def links(page: str) -> Iterator[tuple[int, str]]:
    """Yield line and target of every link and image."""
    for line, token in _inline(page):
        if target := token.attrs.get("href" if token.type == "link_open" else "src"):
            yield line, str(target)
