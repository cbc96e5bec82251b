"""The commands on the pages run as they stand, in the order of a page, with little text and short training."""

import io
import lzma
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.byte_model import TURNS, wrapped_tokenizer
from tests.docs import pages, real
from tests.docs.shell import commands
from tests.docs.test_snippets import ADDRESS
from tests.model.llama_folders import llama_folder, random_llama

WALKS = ("quickstart", "training evaluation", "retrofit", "looped", "chat")
"""Pages of docs/. Commands on the second page use what those on the first have written."""

COMMANDS = ("recipes", "generate", "chat", "train", "evaluate", "retrofit", "convert")
PUBLIC = "HuggingFaceTB/SmolLM2-135M-Instruct"
ELSEWHERE = {"BASE", "ByteDance/Ouro-1.4B", "c4.txt", "objective=mine.objective"}
"""What only the reader has: placeholders, large models, a corpus, a module (tests/training/test_extension.py)."""

SHORT = ("--set", "total_tokens=4096", "--set", "tokens_per_step=2048", "--no-compile")
END = "\n<|endoftext|>\n"


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change to a folder with the first documents of data/tales, and a random model under the name of a public one."""
    (tmp_path / "data/tales").mkdir(parents=True)
    for file in (pages.ROOT / "data/tales").glob("*.xz"):
        with lzma.open(file, "rt", encoding="utf-8") as text:
            documents = text.read(100_000).split(END)[:8]
        (tmp_path / "data/tales" / file.name).write_bytes(lzma.compress(END.join(documents).encode()))
    shape = {"vocab_size": 257, "num_hidden_layers": 8, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
    llama_folder(tmp_path / PUBLIC, random_llama(**shape, max_position_embeddings=256).bfloat16())
    wrapped_tokenizer(TURNS).save_pretrained(tmp_path / PUBLIC)
    monkeypatch.chdir(tmp_path)


def runs_here(command: list[str]) -> bool:
    is_ours = (command[0] == "nvium" and command[1] in COMMANDS) or command[:3] == ["python", "-m", "research.tales"]
    return is_ours and ELSEWHERE.isdisjoint(command)


@pytest.mark.usefixtures("checkout")
@pytest.mark.parametrize("walk", WALKS)
def test_the_commands_of_a_page_run(walk, nvium, monkeypatch):
    blocks = [block for page in walk.split() for block in pages.blocks(f"docs/{page}.md") if not block.is_python]
    found = [command for block in blocks for command in commands(block.text) if runs_here(command)]
    assert found
    for command in found:
        monkeypatch.setattr(sys, "stdin", io.StringIO("Tell me a tale of a fox.\n"))
        if command[0] == "python":
            real.TALES.main(command[3:], standalone_mode=False)
        else:
            assert nvium(*command[1:], *(SHORT if command[1] == "train" else ())).out.strip(), command


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md", "docs/looped.md"])
def test_the_requests_of_a_page_are_answered(page, server):
    blocks = [block.text for block in pages.blocks(page) if block.text.startswith("curl")]
    assert blocks
    for command in commands("\n".join(blocks).replace(ADDRESS, server.url)):
        answer = subprocess.run([*command, "--silent", "--fail-with-body"], capture_output=True, text=True, check=False)
        assert answer.returncode == 0, f"{shlex.join(command)}: {answer.stdout}"
        assert '"choices"' in answer.stdout
