import subprocess
from pathlib import Path

import pytest

from nvium_core.training.data.texts import documents_of
from research.stories.corpus import main

LONG = "The wheel turned all day long. " * 7 + "It stopped."
PAGE = '<html xmlns:epub="http://www.idpf.org/2007/ops"><body><section epub:type="{}">{}</section></body></html>'
MILL = '<hgroup><h2>I</h2><p>The Mill</p></hgroup><p>“Half—½ a loaf …”<a epub:type="noteref">1</a></p><hr/>'
VERSE = "<blockquote><p><span>Turn,</span>\n<br/>\n<span>wheel.</span></p></blockquote>"
PAGES = {"end": ("colophon", ""), "two": ("chapter", MILL), "one": ("chapter", "<h2>II</h2>" + VERSE)}
BOOK = {f"src/epub/{name}.xhtml": PAGE.format(kind, f"{text}<p>{LONG}</p>") for name, (kind, text) in PAGES.items()}
ITEMS = "".join(f'<item id="{name}" href="{name}.xhtml"/><itemref idref="{name}"/>' for name in PAGES)
KITE = f"# A *Kite*\n##\nUp,up\nand away .\n“Back!”\n\n##\nFly, kite,\nFly high!\n\n##\n{LONG}\n\n##\n* License: []\n"


def commit(folder: Path, files: dict[str, str]) -> str:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    git = ["git", "-C", str(folder), "-c", "user.name=A", "-c", "user.email=a@b.org"]
    for command in ("init -q", "add .", "commit -q -m Add"):
        subprocess.run([*git, *command.split()], check=True)
    return subprocess.check_output([*git, "rev-parse", "HEAD"], text=True).strip()


def test_a_split_is_rebuilt_and_differences_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = [f'A Kite\n\nUp, up and away.\n\n"Back!"\n\nFly, kite,\nFly high!\n\n{LONG}']
    texts += [f'The Mill\n\n"Half--1/2 a loaf..."\n\n* * *\n\n{LONG}', f"Corn\n\nTurn,\nwheel.\n\n{LONG}"]
    book = commit(tmp_path / "corn", {**BOOK, "src/epub/content.opf": f"<package>{ITEMS}</package>"})
    story = commit(tmp_path / "kite", {"k.md": KITE})
    rows = ["title repository commit file split characters documents", f"Kite kite {story} k.md valid 9 1"]
    rows += [f"Corn corn {book}  valid {len(texts[1] + texts[2])} 3"]
    rows += ["Tales tales   valid 1 1", "Tales tales   train 1 1"]
    (tmp_path / "works.tsv").write_text("\n".join(rows).replace(" ", "\t"))
    main([str(tmp_path / "works.tsv"), str(tmp_path), "valid", str(tmp_path / "valid.txt.xz")])
    assert sorted(documents_of(tmp_path / "valid.txt.xz")) == sorted(texts)
    kite, corn, tales = capsys.readouterr().err.splitlines()
    assert (kite, corn) == (f"Kite: {len(texts[0])} characters, works.tsv has 9", "Corn: 2 documents, works.tsv has 3")
    assert tales == "Tales: left out, a collection with tales in several splits"
