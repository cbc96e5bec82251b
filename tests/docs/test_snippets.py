from tests.docs import pages

ADDRESS = "http://127.0.0.1:8000"


def test_every_snippet_runs_and_prints_something(server, capsys):
    snippets = [block for page in pages.PAGES for block in pages.blocks(page) if block.is_python]
    snippets = [block for block in snippets if not block.text.startswith("# mine.py")]  # tests/training/test_extension
    assert snippets
    for snippet in snippets:
        exec(compile(snippet.text.replace(ADDRESS, server.url), snippet.place, "exec"), {})
        assert capsys.readouterr().out.strip(), snippet.place
