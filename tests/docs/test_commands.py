"""Every command on every page exists, with the options that the page uses. No command is run."""

from tests.docs import pages, real
from tests.docs.shell import commands

PROGRAMS = tuple(f"{program} " for program in real.CHECKS)


def problem(text: str) -> str:
    """Return what is wrong with the commands of a block or span, or an empty string."""
    try:
        for command in commands(text):
            real.check(command)
    except (Exception, SystemExit) as error:
        return repr(error)
    return ""


def test_every_command_exists():
    codes = [code for page in pages.PAGES for code in (*pages.blocks(page), *pages.spans(page))]
    texts = [code for code in codes if code.text.startswith(PROGRAMS) and not code.text.startswith("nvium COMMAND")]
    assert texts
    assert [f"{code.place}: {found}" for code in texts if (found := problem(code.text))] == []
