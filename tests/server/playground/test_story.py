"""What the page shows is what the API answers."""

from itertools import pairwise
from typing import Any

import pytest
from playwright.sync_api import Browser, expect

from nvium_core import LoadedModel
from tests.byte_model import load_byte_model
from tests.server.live_server import LiveServer, live_server, wait_until
from tests.server.playground.visit import PROMPT, Visit, visiting

LOOKS = """spans => spans.map((span) => {
    const { color, backgroundColor, textDecorationColor, textDecorationStyle } = getComputedStyle(span);
    return { exit: span.dataset.exit, look: [color, backgroundColor, textDecorationColor, textDecorationStyle] };
})"""

END = {"stop": "ended", "length": "reached its length"}


def answer(server: LiveServer, **body: Any) -> dict[str, Any]:
    """The whole response to what the page asks as a stream."""
    response = server.http.post("/v1/completions", json={"model": "default", "prompt": PROMPT, **body})
    assert response.status_code == 200
    return response.json()


def texts_of(choice: dict[str, Any]) -> list[str]:
    """The text of each token."""
    offsets = [*choice["nvium"]["text_offsets"], None]
    return [choice["text"][start:end] for start, end in pairwise(offsets)]


def test_the_tokens_and_exits_of_a_story_are_those_of_the_api(visit: Visit) -> None:
    visit.write(seed=11, length=120, temperature=0.9, top_p=0.95)
    asked = {"seed": 11, "max_tokens": 120, "temperature": 0.9, "top_p": 0.95, "nvium": {"text_offsets": True}}
    [choice] = answer(visit.server, **asked)["choices"]
    shown = visit.all_tokens()
    assert shown == list(zip(texts_of(choice), choice["nvium"]["exits"], strict=True))
    assert visit.page.locator("#output").text_content() == choice["text"]
    assert visit.status() == f"The story {END[choice['finish_reason']]} after {len(shown)} tokens."
    assert len(set(choice["nvium"]["exits"])) == 4


@pytest.mark.usefixtures("unhurried")
def test_a_story_can_be_read_while_it_is_written(visit: Visit) -> None:
    visit.ask(seed=1, length=900)
    expect(visit.tokens.nth(5)).to_be_attached()
    assert visit.status() == "Writing…"
    assert visit.server.gauge("nvium_requests_running") == 1
    visit.page.click("#stop")


def test_every_exit_has_colours_and_an_underline_of_its_own(visit: Visit) -> None:
    visit.write(seed=11, length=120)
    visit.page.mouse.move(0, 0)
    looks = {(span["exit"], *span["look"]) for span in visit.tokens.evaluate_all(LOOKS)}
    assert sorted(number for number, *_ in looks) == ["1", "2", "3", "4"]
    for parts in list(zip(*looks, strict=True))[1:]:
        assert len(set(parts)) == 4


@pytest.mark.usefixtures("unhurried")
def test_the_button_stops_a_story_and_frees_its_request(visit: Visit) -> None:
    visit.ask(seed=1, length=900)
    expect(visit.tokens.nth(10)).to_be_attached()
    assert visit.server.gauge("nvium_requests_running") == 1
    visit.page.click("#stop")
    wait_until(lambda: visit.server.gauge("nvium_requests_running") == 0, seconds=5)
    expect(visit.page.locator("#status")).to_have_text(f"The story was stopped after {visit.tokens.count()} tokens.")
    assert visit.tokens.count() < 900
    assert visit.page.locator("#stop").is_disabled()
    visit.write(seed=1, length=5)
    assert visit.tokens.count() == 5


def test_stop_strings_end_a_story_and_do_not_show(visit: Visit) -> None:
    whole = answer(visit.server, seed=3, max_tokens=60)["choices"][0]["text"]
    stop = whole[40:44]
    visit.write(seed=3, length=60, stops=f"no such words\n{stop}")
    assert visit.page.locator("#output").text_content() == whole[: whole.index(stop)]
    assert visit.status().startswith("The story ended")


def test_a_line_break_can_be_a_stop_string(visit: Visit) -> None:
    visit.page.fill("#stops", "\\n\nThe end")
    read = "import('/assets/request.js').then(({ request }) => request().stop)"
    assert visit.page.evaluate(read) == ["\n", "The end"]


def test_without_a_seed_each_story_has_one_of_its_own_that_is_told(visit: Visit) -> None:
    told = []
    for _ in range(2):
        visit.write(length=8)
        told.append(visit.page.locator("#exits-run .about").inner_text().split()[-1].rstrip("."))
    assert told[0] != told[1]
    expected = answer(visit.server, seed=int(told[1]), max_tokens=8)["choices"][0]["text"]
    assert visit.page.locator("#output").text_content() == expected


def test_half_characters_never_show_and_their_tokens_have_spans(chromium: Browser, byte_model: LoadedModel) -> None:
    with live_server(load_byte_model()) as server, visiting(chromium, server) as visit:
        visit.write("Once", seed=5, length=80)
        [choice] = answer(server, prompt="Once", seed=5, max_tokens=80)["choices"]
        shown = visit.all_tokens()
        assert [number for _, number in shown] == choice["nvium"]["exits"]
        assert "".join(text for text, _ in shown) == choice["text"]
        assert "" in [text for text, _ in shown]
        visit.check()


def test_what_is_counted_is_what_the_api_counts(visit: Visit) -> None:
    visit.write(seed=11, length=120)
    told = answer(visit.server, seed=11, max_tokens=120)["nvium"]
    counts = visit.page.locator("#exits-run .exits tr td:nth-of-type(3)").all_inner_texts()
    assert list(map(int, counts)) == told["exit_counts"]
    names, values = (visit.page.locator(f"#exits-run .figures {part}").all_inner_texts() for part in ("dt", ".value"))
    figures = dict(zip(names, values, strict=True))
    assert float(figures["Mean depth"]) == pytest.approx(told["mean_depth"], abs=0.006)
    runs = sum(number * count for number, count in enumerate(told["exit_counts"], start=1)) / 120
    assert float(figures["Blocks per token"]) == pytest.approx(runs, abs=0.006)
    assert all(figures[name][0].isdecimal() for name in ("First token", "Speed"))


def test_the_mixture_stands_beside_and_takes_every_token_to_the_last_exit(visit: Visit) -> None:
    visit.page.check("#compare")
    visit.write(seed=11, length=40)
    assert visit.page.locator("#mixture-output span[data-exit]").count() == 40
    body = answer(visit.server, seed=11, max_tokens=40, nvium={"sampling": "mixture"})
    assert visit.page.locator("#mixture-output").text_content() == body["choices"][0]["text"]
    assert visit.page.locator("#mixture-output span:not([data-exit='4'])").count() == 0
    assert visit.tokens.count() == 40
    left, right = (visit.page.locator(run).bounding_box() for run in ("#exits-run", "#mixture-run"))
    assert left and right
    assert left["y"] == right["y"] and left["x"] + left["width"] <= right["x"]
