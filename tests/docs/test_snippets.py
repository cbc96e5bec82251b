"""Python on the pages runs as it stands, beside a server where one is asked for."""

import pytest

from tests.docs import pages
from tests.docs.pages import Code
from tests.docs.test_commands import ADDRESS
from tests.server.live_server import LiveServer

SNIPPETS = [block for page in pages.PAGES for block in pages.blocks(page) if block.is_python]


@pytest.mark.parametrize("snippet", SNIPPETS, ids=lambda snippet: snippet.place)
def test_a_snippet_runs_and_prints_something(
    snippet: Code, server: LiveServer, capsys: pytest.CaptureFixture[str]
) -> None:
    exec(snippet.text.replace(ADDRESS, server.url), {})
    assert capsys.readouterr().out.strip()
