"""Every command on every page exists, with the options that the page gives it. No command is run."""

from tests.docs import pages, real
from tests.docs.shell import commands

PROGRAMS = tuple(f"{program} " for program in real.CHECKS)


def complaint(text: str) -> str:
    """What is wrong with the commands of a block or a span; empty if nothing is."""
    try:
        for command in commands(text):
            real.check(command)
    except (Exception, SystemExit) as error:
        return repr(error)
    return ""


def test_every_command_calls_what_exists() -> None:
    blocks = [block for page in pages.PAGES for block in pages.blocks(page) if block.text.startswith(PROGRAMS)]
    spans = [span for page in pages.PAGES for span in pages.spans(page) if span.text.startswith(PROGRAMS)]
    assert blocks and spans
    texts = [code for code in [*blocks, *spans] if not code.text.startswith("nvium COMMAND")]
    assert [f"{code.place}: {told}" for code in texts if (told := complaint(code.text))] == []
