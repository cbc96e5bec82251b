"""The page of coloured text: nothing but itself, all of the text, a colour for every exit."""

from html.parser import HTMLParser

import pytest

from nvium_core import LoadedModel
from nvium_core.evaluation.coloured_text import page
from nvium_core.evaluation.latency import TimedToken
from tests.byte_model import EXIT_LAYERS, load_byte_model, token_ids


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_byte_model()


class Reader(HTMLParser):
    """The text of paragraphs, the classes in them, and whatever would be fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.classes, self.fetched = "", list[str](), list[str]()
        self.is_paragraph = False

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.is_paragraph |= tag == "p"
        self.fetched += [name for name, _ in attributes if name in ("src", "href")]
        if self.is_paragraph:
            self.classes += [value or "" for name, value in attributes if name == "class"]

    def handle_data(self, data: str) -> None:
        self.text += data if self.is_paragraph else ""


def test_text_and_exits_are_those_that_were_spoken(loaded: LoadedModel) -> None:
    prompt, said = "Is 1 < 2 & 3?", "Yes, <b>né</b>!"
    exits = [1 + n % 3 for n in range(len(token_ids(said)))]
    spoken = [TimedToken(token, exit_, 0.25, 0.001) for token, exit_ in zip(token_ids(said), exits, strict=True)]
    html, reader = page(loaded, [(token_ids(prompt), spoken)]), Reader()
    reader.feed(html)
    assert reader.text.strip() == prompt + said
    assert reader.classes == [f"e{exit_}" for exit_ in exits]
    assert not reader.fetched
    assert all(f".e{k} {{ background" in html for k in range(1, len(EXIT_LAYERS) + 1))
    assert "exit 1, p 0.25, 1.0 ms" in html


def test_the_legend_says_how_often_each_exit_spoke(loaded: LoadedModel) -> None:
    spoken = [TimedToken(70, exit_, 0.5, 0.001) for exit_ in (1, 1, 1, 3)]
    html = page(loaded, [(token_ids("A"), spoken)])
    assert "layer 1, 75% of tokens" in html
    assert "layer 2, 0% of tokens" in html
    assert "layer 4, 25% of tokens" in html
