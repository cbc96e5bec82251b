"""Rebuild one split of the story corpus from git clones of its sources.

    cut -f 3 data/works.tsv | grep / | sort -u | while read -r it; do git clone https://github.com/$it CLONES/$it; done
    python -m research.stories.corpus data/works.tsv CLONES valid valid.txt.xz

Documents are written in a random order, but not the original one. Six collections have tales in several
splits, and works.tsv does not say which tales. The script leaves these collections out and names them on stderr. It
also names every work whose number of documents or characters differs from works.tsv: the corpus lacks 35 documents with
an offensive word, which the script keeps, and the rules were checked on ten works only.
"""

import csv
import lzma
import random
import re
import sys
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from subprocess import PIPE, CalledProcessError, run
from unicodedata import normalize
from xml.etree.ElementTree import Element, fromstring

from research.tales.pack import SEPARATOR

Work = Mapping[str, str]
SHORTEST, LONGEST_UNDIVIDED = 200, 60_000
SKIPPED_FILES = {"standardebooks/helen-keller_the-story-of-my-life": "letters|chapter-[23]-"}
FRONT = {"titlepage", "halftitlepage", "imprint", "colophon", "copyright-page", "dedication", "epigraph", "toc", "loi"}
SKIPPED = FRONT | {"bridgehead", "endnotes", "footnote", "footnotes", "rearnotes", "noteref", "glossary", "appendix"}
SKIPPED |= {"figure", "img", "math", "nav"}
BLOCKS = {"section", "article", "header", "footer", "blockquote", "div", "p", "ul", "ol", "dl", "hr", "table"}
HEADINGS = {"h1", "h2", "h3", "h4", "h5", "h6", "hgroup"}
LETTERS = str.maketrans("“”„″‘’‚′‐‑−", "\"\"\"\"''''---", "\u00ad\u2009\u200a\u200b\u200c\u200d\u2060\ufeff")
DIGRAPHS = {"æ": "ae", "Æ": "Ae", "œ": "oe", "Œ": "Oe"}


def plain(text: str) -> str:
    """Replace typographic characters by those of a keyboard, and letters outside Latin-1 by ASCII."""
    text = normalize("NFC", text).translate(LETTERS)
    text = re.sub(r"\s*[—–―]+\s*|[⸺⸻]", "--", re.sub(r"(?<=\d)–(?=\d)", "-", text))
    text = re.sub(r"(?<=\d)(?=[¼-¾⅐-⅞])", " ", re.sub(r"\s*…", "...", text))
    text = re.sub("[æÆœŒ]", lambda letter: DIGRAPHS[letter[0]], text)
    return re.sub(r"[^\S\n]+", " ", re.sub(r"[¼-¾]|[^\x00-\xff]", ascii_of, text)).strip()


def ascii_of(character: re.Match[str]) -> str:
    return normalize("NFKD", character[0]).replace("⁄", "/").encode("ascii", "ignore").decode()


def tag(element: Element) -> str:
    return element.tag.rpartition("}")[2]


def is_any(element: Element, names: set[str]) -> bool:
    """Return whether the element's tag or one of its epub:types is among the names."""
    types = element.get("{http://www.idpf.org/2007/ops}type", "").split()
    return not names.isdisjoint([tag(element), *types])


def inline(element: Element, skipped: set[str]) -> str:
    """Return the element's text, with a vertical tab for each `<br/>`."""
    text = element.text or ""
    for child in element:
        own = "" if is_any(child, skipped) else inline(child, skipped)
        text += ("\v" if tag(child) == "br" else own) + (child.tail or "")
    return re.sub(r"[ \t\n]+", " ", text)


def lines(element: Element, skipped: set[str] = SKIPPED) -> str:
    return "\n".join(filter(None, map(plain, inline(element, skipped).split("\v"))))


def title(heading: Element) -> str:
    """Return the words of a heading without its number."""
    numbers = SKIPPED | {"label", "ordinal", "z3998:ordinal"}
    parts = (part for part in (heading if tag(heading) == "hgroup" else [heading]) if not is_any(part, numbers))
    words = (lines(part, numbers).replace("\n", " ") for part in parts)
    return ": ".join(part for part in words if part and not re.fullmatch(r"(\w+ )?[IVXLCDM]+\.?", part))


def paragraphs(element: Element, apart: Sequence[Element] = ()) -> Iterator[str]:
    """Yield the paragraphs of an element except those in the elements `apart`."""
    for child in element:
        if child in apart or (is_any(child, SKIPPED) and tag(child) != "blockquote"):
            continue
        if tag(child) == "hr":
            yield "* * *"
        elif tag(child) in HEADINGS:
            yield title(child) or lines(child)
        elif tag(child) == "table":
            yield "\n".join(" ".join(filter(None, map(lines, row))) for row in child.iter() if tag(row) == "tr")
        elif any(tag(block) in BLOCKS | HEADINGS for block in child):
            yield from paragraphs(child, apart)
        else:
            yield lines(child).removeprefix("--" if tag(child) == "cite" else "")


def chapters(element: Element, name: str) -> Iterator[str]:
    """Yield a chapter below its title or else below `name`. Divide it at its sections if it is long."""
    inside = [*element, *(child for header in element if tag(header) == "header" for child in header)]
    heading = [child for child in inside if tag(child) in HEADINGS][:1]
    name = "".join(map(title, heading)) or name
    sections = [child for child in element if tag(child) in {"section", "article"} and not is_any(child, SKIPPED)]
    text = document(name, paragraphs(element, heading))
    if not sections or len(text) <= LONGEST_UNDIVIDED:
        yield text
    else:
        yield document(name, paragraphs(element, [*heading, *sections]))
        for section in sections:
            yield from chapters(section, name)


def document(name: str, texts: Iterable[str]) -> str:
    """Return a document without breaks at its start or end or after another break."""
    kept = [name]
    for text in filter(None, texts):
        if text != "* * *" or (len(kept) > 1 and kept[-1] != text):
            kept.append(text)
    return "\n\n".join(kept).removesuffix("\n\n* * *")


def joined(block: str) -> str:
    """Join the lines of prose. A block is verse unless a line without punctuation at its end goes on in lower case."""
    block = re.sub(r" *\n *", "\n", block.strip())
    if re.search(r"[^\W_]\n[a-z]", block):
        block = re.sub(r"(?<!\n)\n(?!\n)", " ", re.sub(r"(?<=[.!?\"'])\n(?=\")", "\n\n", block))
    return block


def story(markdown: str) -> str:
    """Return the text of a Markdown story: `##` begins a page, a list of facts ends it."""
    text = re.sub(r"\[\^\w+\]:?|[*_]", "", markdown.partition("\n* License")[0])
    text = re.sub(r"\.{5,}", "...", re.sub(r"(?m)^#+ *", "\n\n", text))
    text = re.sub(r",(?=[A-Za-z])", ", ", re.sub(r"(?<=[\w\"'?!)])\s+([,;:?!]|\.(?!\.))", r"\1", plain(text)))
    return "\n\n".join(filter(None, map(joined, text.split("\n\n"))))


def committed(clone: Path, work: Work, file: str) -> str:
    command = ["git", "-C", str(clone), "show", f"{work['commit']}:{file}"]
    return run(command, check=True, stdout=PIPE, encoding="utf-8").stdout  # noqa: S603 (our own)


def documents(work: Work, clone: Path) -> Iterator[str]:
    if work["file"]:
        yield story(committed(clone, work, work["file"]))
        return
    package = fromstring(committed(clone, work, "src/epub/content.opf"))  # noqa: S314 (the reader's own clone)
    files = {item.get("id"): item.get("href", "") for item in package.iter() if tag(item) == "item"}
    for file in (files[item.get("idref")] for item in package.iter() if tag(item) == "itemref"):
        if not re.search(SKIPPED_FILES.get(work["repository"], "^$"), file):
            page = fromstring(committed(clone, work, f"src/epub/{file}"))  # noqa: S314 (the same)
            for section in (child for body in page if tag(body) == "body" for child in body):
                yield from () if is_any(section, SKIPPED) else chapters(section, work["title"])


def rebuilt(works: Sequence[Work], clones: Path, split: str) -> Iterator[str]:
    """Yield the documents of a split, and write the differences from `works` to stderr."""
    rows = Counter((work["repository"], work["file"]) for work in works)
    for work in (work for work in works if work["split"] == split):
        if rows[work["repository"], work["file"]] > 1:
            print(f"{work['title']}: left out, a collection with tales in several splits", file=sys.stderr)
            continue
        texts = [text for text in documents(work, clones / work["repository"]) if len(text) >= SHORTEST]
        for name, number in {"documents": len(texts), "characters": sum(map(len, texts))}.items():
            if number != int(work[name]):
                print(f"{work['title']}: {number:,} {name}, works.tsv has {int(work[name]):,}", file=sys.stderr)
        yield from texts


def main(arguments: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(prog="python -m research.stories.corpus", description=__doc__.splitlines()[0])
    parser.add_argument("works", type=Path, help="data/works.tsv")
    parser.add_argument("clones", type=Path, help="folder of git clones, as OWNER/NAME")
    parser.add_argument("split", choices=["train", "valid", "test"])
    parser.add_argument("text", type=Path, help="xz file to write")
    args = parser.parse_args(arguments)
    with args.works.open(encoding="utf-8", newline="") as file:
        works = list(csv.DictReader(file, delimiter="\t"))
    try:
        texts = list(dict.fromkeys(rebuilt(works, args.clones, args.split)))
    except CalledProcessError as error:
        parser.error(f"a repository or commit is missing: {' '.join(error.cmd)}")
    random.Random(0).shuffle(texts)
    args.text.write_bytes(lzma.compress(SEPARATOR.join(texts).encode()))


if __name__ == "__main__":
    main()
