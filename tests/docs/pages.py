"""What the pages for readers hold: blocks of code, code within lines, and links."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parent.parent.parent
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").rglob("*.md"))),
    "benchmarks/README.md",
    "tests/conformance/README.md",
    "nvium_core/checkpoints/stories-9m/README.md",
)


@dataclass(frozen=True)
class Code:
    """A piece of code on a page; `line` counts from 1."""

    page: str
    line: int
    text: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def first_line(self) -> str:
        return self.text.strip().splitlines()[0].strip()

    @property
    def is_python(self) -> bool:
        """It can be parsed, and imports something."""
        try:
            nodes = ast.parse(self.text).body
        except SyntaxError:
            return False
        return any(isinstance(node, ast.Import | ast.ImportFrom) for node in nodes)


def tokens(page: str) -> list[Token]:
    return MarkdownIt().enable("table").parse((ROOT / page).read_text(encoding="utf-8"))


def blocks(page: str) -> Iterator[Code]:
    """Indented or fenced."""
    for token in tokens(page):
        if token.type in ("code_block", "fence"):
            assert token.map
            yield Code(page, token.map[0] + 1, token.content)


def _inline(page: str) -> Iterator[tuple[int, Token]]:
    for token in tokens(page):
        for child in token.children or ():
            yield (token.map or [0])[0] + 1, child


def spans(page: str) -> Iterator[Code]:
    """Code within lines and tables."""
    for line, token in _inline(page):
        if token.type == "code_inline":
            yield Code(page, line, token.content)


def links(page: str) -> Iterator[tuple[int, str]]:
    """Line and target of every link and picture."""
    for line, token in _inline(page):
        if target := token.attrs.get("href" if token.type == "link_open" else "src"):
            yield line, str(target)
