"""The page shows the API's response."""

import re
from itertools import pairwise
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.byte_model import load_byte_model
from tests.server.live_server import LiveServer, live_server, wait_until
from tests.server.playground.conftest import PROMPT, SECONDS, visiting

LOOKS = """spans => spans.map((span) => {
    const { color, backgroundColor, textDecorationColor, textDecorationStyle } = getComputedStyle(span);
    return { exit: span.dataset.exit, look: [color, backgroundColor, textDecorationColor, textDecorationStyle] };
})"""

END = {"stop": "ended", "length": "reached its length"}

GAIN = r"^([\d.]+) times as fast with early exits: ([\d.]+) s for two runs, ([\d.]+) s without\.( But .+ is busy\.)?$"


def answer(server: LiveServer, **body: Any) -> dict[str, Any]:
    """Return the whole response to the page's streamed request."""
    response = server.http.post("/v1/completions", json={"model": "default", "prompt": PROMPT, **body})
    assert response.status_code == 200
    return response.json()


def test_a_story_has_the_tokens_exits_and_figures_of_the_api(visit):
    visit.write(seed=11, length=120, temperature=0.9, top_p=0.95)
    asked = {"seed": 11, "max_tokens": 120, "temperature": 0.9, "top_p": 0.95, "nvium": {"text_offsets": True}}
    body = answer(visit.server, **asked)
    [choice] = body["choices"]
    shown = visit.all_tokens()
    places = pairwise([*choice["nvium"]["text_offsets"], None])
    texts = [choice["text"][start:end] for start, end in places]
    assert shown == list(zip(texts, choice["nvium"]["exits"], strict=True))
    assert visit.page.locator("#output").text_content() == choice["text"]
    assert visit.status() == f"The story {END[choice['finish_reason']]} after {len(shown)} tokens. Seed 11."
    assert len(set(choice["nvium"]["exits"])) == 4
    counts = visit.page.locator("#run .exits tr td:nth-of-type(3)").all_inner_texts()
    assert list(map(int, counts)) == body["nvium"]["exit_counts"]
    names, values = (visit.page.locator(f"#run .figures {part}").all_inner_texts() for part in ("dt", ".value"))
    figures = dict(zip(names, values, strict=True))
    assert float(figures["Mean depth"]) == pytest.approx(body["nvium"]["mean_depth"], abs=0.006)
    runs = sum(number * count for number, count in enumerate(body["nvium"]["exit_counts"], start=1)) / len(shown)
    assert float(figures["Blocks per token"]) == pytest.approx(runs, abs=0.006)
    assert figures["First token"][0].isdecimal()


def test_every_exit_has_its_own_colours_and_underline(visit):
    visit.write(seed=11, length=120)
    visit.page.mouse.move(0, 0)
    looks = {(span["exit"], *span["look"]) for span in visit.tokens.evaluate_all(LOOKS)}
    assert sorted(number for number, *_ in looks) == ["1", "2", "3", "4"]
    for parts in list(zip(*looks, strict=True))[1:]:
        assert len(set(parts)) == 4


@pytest.mark.usefixtures("unhurried")
def test_a_story_is_shown_while_it_is_generated_and_the_button_stops_it(visit):
    visit.ask(seed=1, length=900)
    expect(visit.tokens.nth(10)).to_be_attached()
    assert visit.status() == "Writing…"
    assert visit.server.gauge("nvium_requests_running") == 1
    visit.page.click("#stop")
    wait_until(lambda: visit.server.gauge("nvium_requests_running") == 0)
    stopped = f"The story was stopped after {visit.tokens.count()} tokens. Seed 1."
    expect(visit.page.locator("#status")).to_have_text(stopped)
    assert visit.tokens.count() < 900
    assert visit.page.locator("#stop").is_disabled()
    visit.write(seed=1, length=5)
    assert visit.tokens.count() == 5


def test_a_request_stops_the_story_that_is_written_when_the_page_opens(chromium, tales, slow_down):
    with visiting(chromium, tales, stops_opening=False) as visit:
        expect(visit.page.locator("#status")).to_contain_text(" after ", timeout=1000 * SECONDS)
        seed = int(visit.page.locator("#seed-used").inner_text().split()[-1])
        body = answer(tales, seed=seed, max_tokens=200, temperature=0.7, top_p=0.95)
        assert visit.page.locator("#output").text_content() == body["choices"][0]["text"]
        assert sum(url.endswith("/v1/completions") for url in visit.requests) == 1
        visit.page.click("#measure")
        expect(visit.page.locator("#gain")).to_have_text(re.compile(GAIN), timeout=1000 * SECONDS)
        ratio, ours, theirs, _ = re.fullmatch(GAIN, visit.page.locator("#gain").inner_text()).groups()
        assert float(ratio) == pytest.approx(float(theirs) / float(ours), rel=0.2)
        slow_down()
        visit.page.reload()
        expect(visit.tokens.nth(3)).to_be_attached()
        visit.ask("A fox", seed=1, length=5)
        expect(visit.page.locator("#status")).to_have_text("The story reached its length after 5 tokens. Seed 1.")
        assert visit.page.locator("#run .prompt").text_content() == "A fox"
        visit.check()


def test_without_a_seed_each_story_gets_another_one_and_a_click_keeps_it(visit):
    seeds, stories = [], []
    for _ in range(3):
        visit.write(length=8)
        seeds.append(visit.page.locator("#seed-used").inner_text())
        stories.append(visit.page.locator("#output").text_content())
        if len(seeds) == 2:
            visit.page.click("#seed-used")
    assert seeds[0] != seeds[1] == seeds[2]
    asked = {"seed": int(seeds[1].removeprefix("Seed ")), "max_tokens": 8, "temperature": 1, "top_p": 1}
    assert stories[1] == stories[2] == answer(visit.server, **asked)["choices"][0]["text"]


PLACES = """spans => spans.map((span) => {
    const { top, left } = span.getClientRects()[0];
    return [span.textContent, top, left];
})"""


def test_a_blank_line_between_paragraphs_is_lower_than_a_line(visit):
    visit.write("A fox.\n\nOne day", seed=11, length=200, temperature=0.7, top_p=0.95)
    assert "\n\n" in visit.page.locator("#output").text_content()
    tops = sorted({round(top) for text, top, _ in visit.tokens.evaluate_all(PLACES) if text.strip()})
    [line, *_, paragraph] = sorted({after - before for before, after in pairwise(tops)})
    assert line < paragraph < 1.6 * line
    of_prompt = visit.page.locator(".prompt").bounding_box()
    assert of_prompt and of_prompt["height"] < 2.6 * line


def test_a_prompt_that_runs_from_right_to_left_does_not_turn_the_story_around(visit):
    lefts = {}
    for prompt in ("Once", "Once\u202e"):
        visit.write(prompt, seed=1, length=6)
        lefts[prompt] = [left for _, _, left in visit.tokens.evaluate_all(PLACES)]
    assert all(places == sorted(places) for places in lefts.values())


def test_half_characters_are_not_shown_but_their_tokens_have_spans(chromium, byte_model):
    with live_server(load_byte_model()) as server, visiting(chromium, server) as visit:
        visit.write("Once", seed=5, length=80)
        [choice] = answer(server, prompt="Once", seed=5, max_tokens=80)["choices"]
        shown = visit.all_tokens()
        assert [number for _, number in shown] == choice["nvium"]["exits"]
        assert "".join(text for text, _ in shown) == choice["text"]
        assert "" in [text for text, _ in shown]
        visit.check()
