"""Python snippets on the pages run, against a server if they use its address."""

import pytest

from tests.docs import pages
from tests.server.live_server import LiveServer

ADDRESS = "http://127.0.0.1:8000"


def test_every_snippet_runs_and_prints_something(server: LiveServer, capsys: pytest.CaptureFixture[str]) -> None:
    snippets = [block for page in pages.PAGES for block in pages.blocks(page) if block.is_python]
    assert snippets
    for snippet in snippets:
        exec(compile(snippet.text.replace(ADDRESS, server.url), snippet.place, "exec"), {})
        assert capsys.readouterr().out.strip(), snippet.place
