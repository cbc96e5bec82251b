"""Looking closer: at a token, at the staircase, by keyboard, on a phone."""

from itertools import accumulate
from typing import Any

import pytest
from playwright.sync_api import Browser, expect

from nvium_core import Engine, EngineConfig, LoadedModel, SamplingParams
from tests.byte_model import EXIT_LAYERS, token_ids
from tests.server.live_server import LiveServer
from tests.server.playground.visit import Visit, visiting

PHONE = {"width": 390, "height": 844}
WIDTH = "document.documentElement.scrollWidth"

STEPS_OF = """async ([numBlocks, exits]) => {
    const { Staircase } = await import("/assets/staircase.js");
    const staircase = new Staircase(numBlocks);
    const steps = exits.flatMap((exit) => staircase.emit(exit));
    const blocks = Array.from({ length: numBlocks }, (_, index) => index + 1);
    const carriers = exits.map((_, row) => blocks.map((block) => staircase.carrier(row, block) ?? null));
    return { steps, carriers, waiting: blocks.map((block) => staircase.waiting(block)) };
}"""


def test_a_token_pointed_at_tells_exit_layer_and_probability(visit: Visit) -> None:
    visit.write(seed=11, length=60)
    body = {"model": "default", "prompt": "Once upon a time", "seed": 11, "max_tokens": 60}
    told = visit.server.http.post("/v1/completions", json=body).json()["choices"][0]["nvium"]
    visit.page.mouse.move(0, 0)
    expect(visit.hint).to_be_hidden()
    for number in (0, 7, told["exits"].index(1), told["exits"].index(4)):
        visit.tokens.nth(number).hover()
        exit_number, layer = told["exits"][number], told["exit_layers"][number]
        expect(visit.hint).to_contain_text(
            f"token {number + 1} left at exit {exit_number} of 4, after layer {layer} of 12"
        )
        expect(visit.hint).to_contain_text(f"exit probability {told['exit_probabilities'][number]:.3f}")
    visit.page.mouse.move(0, 0)
    expect(visit.hint).to_be_hidden()


def test_a_token_tells_what_became_of_the_blocks_it_skipped(visit: Visit) -> None:
    visit.write(seed=11, length=60)
    exits = [number for _, number in visit.all_tokens()]
    early = exits.index(1)
    carriers = [next((row for row in range(early, 60) if exits[row] >= block), None) for block in (2, 3, 4)]
    visit.tokens.nth(early).hover()
    for block, carrier in zip((2, 3, 4), carriers, strict=True):
        fate = "was never needed" if carrier is None else f"was run later, with token {carrier + 1}"
        expect(visit.hint).to_contain_text(f"block {block} {fate}")


def test_a_column_of_the_staircase_is_its_token(visit: Visit) -> None:
    visit.write(seed=11, length=8)
    drawing = visit.page.locator("#exits-run .scroller svg")
    for number, x in ((0, 5), (1, 30), (4, 70)):
        drawing.hover(position={"x": x, "y": 10})
        expect(visit.hint).to_contain_text(f"token {number + 1} left")
        expect(visit.tokens.nth(number)).to_have_class("marked")


def test_the_staircase_that_is_drawn_is_the_one_that_is_reckoned(visit: Visit) -> None:
    visit.write(seed=11, length=60)
    exits = [number for _, number in visit.all_tokens()]
    reckoned = visit.page.evaluate(STEPS_OF, [4, exits])
    drawing = visit.page.locator("#exits-run .scroller")
    assert drawing.locator(".spoke").count() == 60
    assert drawing.locator(".spoke, .passed").count() == sum(exits) == len(reckoned["steps"])
    assert drawing.locator(".carried").count() == sum(step["first"] < step["last"] for step in reckoned["steps"])
    waiting = [max(0, lane["end"] - lane["first"]) for lane in reckoned["waiting"]]
    counts = visit.page.locator("#exits-run .counts li").all_inner_texts()
    assert counts == [f"{number} dropped" if number else "" for number in reversed(waiting)]


def test_the_staircase_reckoned_from_exits_is_the_one_that_the_engine_takes(
    visit: Visit, byte_model: LoadedModel
) -> None:
    engine = Engine(byte_model.model, EngineConfig(max_sequences=1))
    engine.add("alone", token_ids("O"), SamplingParams(max_tokens=100, seed=2, ignore_eos=True))
    taken, exits = [], []
    while engine.has_work:
        exits += [event.exit for event in engine.step()]
        taken += [(report.block, report.num_rows) for report in engine.reports]
    assert set(exits) == {1, 2, 3}
    reckoned = visit.page.evaluate(STEPS_OF, [len(EXIT_LAYERS), exits])
    assert [(step["block"], step["last"] - step["first"] + 1) for step in reckoned["steps"]] == taken
    for row, carriers in enumerate(reckoned["carriers"]):
        later = list(accumulate(exits[row:], max))
        firsts = [next((row + i for i, deepest in enumerate(later) if deepest >= block), None) for block in (1, 2, 3)]
        assert carriers == firsts


def tab_to(visit: Visit, name: str) -> None:
    """A few presses of Tab from where the focus is."""
    for _ in range(5):
        visit.page.keyboard.press("Tab")
        if visit.page.evaluate("document.activeElement.id") == name:
            return
    raise AssertionError(f"{name} is not reached")


@pytest.mark.usefixtures("unhurried")
def test_a_keyboard_is_enough(visit: Visit) -> None:
    page = visit.page
    press = page.keyboard.press
    expect(page.locator("#model")).not_to_be_empty()
    tab_to(visit, "prompt")
    press("Control+a")
    page.keyboard.type("The old king")
    for name, value in (("temperature", "0.8"), ("top-p", "0.9"), ("length", "900"), ("seed", "4")):
        tab_to(visit, name)
        press("Control+a")
        page.keyboard.type(value)
    press("Control+Enter")
    expect(visit.tokens.nth(20)).to_be_attached()
    press("Escape")
    expect(page.locator("#status")).to_contain_text("was stopped after")
    for _ in range(20):
        press("Tab")
        if page.evaluate("document.activeElement.matches('span[data-exit]')"):
            break
    expect(visit.hint).to_contain_text("token 1 left")
    press("ArrowRight")
    press("ArrowRight")
    expect(visit.hint).to_contain_text("token 3 left")
    press("ArrowLeft")
    expect(visit.hint).to_contain_text("token 2 left")
    press("End")
    expect(visit.hint).to_contain_text(f"token {visit.tokens.count()} left")
    press("Escape")
    expect(visit.hint).to_be_hidden()


@pytest.mark.usefixtures("unhurried")
def test_the_buttons_are_reached_and_pressed_by_keyboard(visit: Visit) -> None:
    visit.page.focus("#send")
    visit.page.keyboard.press("Enter")
    expect(visit.tokens.nth(3)).to_be_attached()
    assert visit.page.evaluate("document.activeElement.id") == "send"
    visit.page.keyboard.press("Tab")
    assert visit.page.evaluate("document.activeElement.id") == "stop"
    visit.page.keyboard.press("Enter")
    expect(visit.page.locator("#status")).to_contain_text("was stopped after")
    assert visit.page.evaluate("document.activeElement.id") == "send"


def test_numbers_tell_the_exits_without_colours_and_are_no_text(visit: Visit) -> None:
    visit.write(seed=11, length=10)
    text = visit.page.locator("#output").text_content()
    visit.page.check("#numbers")
    numbers = "spans => spans.map(span => getComputedStyle(span, '::after').content)"
    assert visit.tokens.evaluate_all(numbers) == [f'"{number}"' for _, number in visit.all_tokens()]
    assert visit.page.locator("#output").text_content() == text


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_needs_no_scrolling_sideways(chromium: Browser, tales: LiveServer, scheme: str) -> None:
    with visiting(chromium, tales, viewport=PHONE, color_scheme=scheme, has_touch=True) as visit:
        assert visit.page.evaluate(WIDTH) == PHONE["width"]
        visit.page.check("#compare")
        visit.write("Once upon a time" + "e" * 200 + " a king", seed=11, length=100)
        assert visit.page.evaluate(WIDTH) == PHONE["width"]
        visit.tokens.nth(5).tap()
        expect(visit.hint).to_contain_text("token 6 left")
        box = visit.hint.bounding_box()
        assert box and box["x"] >= 0 and box["x"] + box["width"] <= PHONE["width"]
        assert visit.page.evaluate(WIDTH) == PHONE["width"]
        visit.check()


def test_settings_are_folded_on_a_phone_and_only_there(chromium: Browser, tales: LiveServer) -> None:
    with visiting(chromium, tales, viewport=PHONE) as visit:
        assert visit.page.locator("#seed").is_hidden()
        visit.page.get_by_text("Settings").click()
        assert visit.page.locator("#seed").is_visible()
        visit.page.fill("#temperature", "3")
        visit.page.get_by_text("Settings").click()
        visit.page.click("#send")
        expect(visit.page.locator("#temperature")).to_be_visible()
        visit.page.get_by_text("Settings").click()
        visit.page.set_viewport_size({"width": 1280, "height": 800})
        expect(visit.page.locator("#seed")).to_be_visible()


@pytest.mark.usefixtures("unhurried")
@pytest.mark.parametrize(("motion", "moves"), [("no-preference", True), ("reduce", False)])
def test_nothing_moves_for_who_wants_that(chromium: Browser, tales: LiveServer, motion: Any, moves: bool) -> None:
    with visiting(chromium, tales, reduced_motion=motion) as visit:
        visit.ask(length=900, seed=1)
        expect(visit.tokens.nth(3)).to_be_attached()
        assert visit.page.evaluate("document.getAnimations().length > 0") == moves
        visit.page.click("#stop")
        visit.check()
