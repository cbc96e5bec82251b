"""Notes of tokens, the staircase, the keyboard, and phones."""

from collections import Counter
from itertools import accumulate

import pytest
import torch
from playwright.sync_api import expect

from nvium_core import Engine, EngineConfig, SamplingParams
from tests.byte_model import EXIT_LAYERS
from tests.random_models import random_model
from tests.server.playground.conftest import Visit, visiting

PHONE = {"width": 390, "height": 844}
WIDTH = "document.documentElement.scrollWidth"

STEPS_OF = """async ([numBlocks, exits, isTied]) => {
    const { Staircase } = await import("/assets/staircase.js");
    const staircase = new Staircase(numBlocks, isTied);
    const steps = exits.flatMap((exit) => staircase.emit(exit));
    const blocks = Array.from({ length: numBlocks }, (_, index) => index + 1);
    const carriers = exits.map((_, row) => blocks.map((block) => staircase.carrier(row, block) ?? null));
    return { steps, carriers, deferred: blocks.map((block) => staircase.deferred(block)) };
}"""


def test_a_tokens_note_shows_its_exit_and_when_its_skipped_blocks_were_computed(visit):
    visit.write(seed=11, length=60)
    body = {"model": "default", "prompt": "Once upon a time", "seed": 11, "max_tokens": 60}
    body |= {"temperature": 1, "top_p": 1}  # as the page was asked
    metadata = visit.server.http.post("/v1/completions", json=body).json()["choices"][0]["nvium"]
    visit.page.mouse.move(0, 0)
    expect(visit.hint).to_be_hidden()
    for number in (0, 7, metadata["exits"].index(1), metadata["exits"].index(4)):
        visit.tokens.nth(number).hover()
        exit_number, layer = metadata["exits"][number], metadata["exit_layers"][number]
        left = f"token {number + 1} left at exit {exit_number} of 4, after layer {layer} of 24"
        expect(visit.hint).to_contain_text(left)
        expect(visit.hint).to_contain_text(f"exit probability {metadata['exit_probabilities'][number]:.3f}")
        for block in range(exit_number + 1, 5):
            carrier = next((row for row in range(number, 60) if metadata["exits"][row] >= block), None)
            fate = "was not computed" if carrier is None else f"was computed later, with token {carrier + 1}"
            expect(visit.hint).to_contain_text(f"block {block} {fate}")
    visit.page.mouse.move(0, 0)
    expect(visit.hint).to_be_hidden()


def test_the_drawing_shows_the_derived_staircase_and_pointing_at_a_column_marks_its_token(visit):
    visit.write(seed=11, length=60)
    exits = [number for _, number in visit.all_tokens()]
    derived = visit.page.evaluate(STEPS_OF, [4, exits])
    drawing = visit.page.locator("#run .scroller")
    assert drawing.locator(".emitted").count() == 60
    assert drawing.locator(".emitted, .passed").count() == sum(exits) == len(derived["steps"])
    assert drawing.locator(".piggybacked").count() == sum(step["first"] < step["last"] for step in derived["steps"])
    deferred = [max(0, lane["end"] - lane["first"]) for lane in derived["deferred"]]
    counts = visit.page.locator("#run .counts li").all_inner_texts()
    assert counts == [f"{number} dropped" if number else "" for number in reversed(deferred)]
    for number, x in ((0, 5), (1, 30), (4, 70)):
        drawing.locator("svg").hover(position={"x": x, "y": 10})
        expect(visit.hint).to_contain_text(f"token {number + 1} left")
        expect(visit.tokens.nth(number)).to_have_class("marked")


def test_the_staircase_shows_the_newest_token_again_when_no_token_is_pointed_at(visit):
    visit.write(seed=11, length=150)
    scroller = visit.page.locator("#run .scroller")
    newest = scroller.evaluate("it => it.scrollLeft")
    visit.tokens.nth(3).hover()
    assert scroller.evaluate("it => it.scrollLeft") < newest
    visit.page.mouse.move(0, 0)
    assert scroller.evaluate("it => it.scrollLeft") == newest > 0


TIED = random_model([2, 4, 6], num_loops=3, context=128, dtype=torch.float32)


@pytest.mark.parametrize("is_tied", [False, True])
def test_the_derived_staircase_equals_the_engines(visit, byte_model, is_tied):
    engine = Engine(TIED if is_tied else byte_model.model, EngineConfig(max_sequences=1, schedule="sweep"))
    engine.add("alone", [5], SamplingParams(max_tokens=100, seed=2, ignore_eos=True))
    exits = []
    num_steps, num_rows = Counter[int](), Counter[int]()
    while engine.has_work:
        exits += [event.exit for event in engine.step()]
        for report in engine.reports:
            num_steps[report.block] += report.num_passes
            num_rows[report.block] += report.num_rows
    assert set(exits) == {1, 2, 3}
    derived = visit.page.evaluate(STEPS_OF, [len(EXIT_LAYERS), exits, is_tied])
    assert Counter(step["block"] for step in derived["steps"]) == num_steps
    for block, rows in num_rows.items():
        assert sum(step["last"] - step["first"] + 1 for step in derived["steps"] if step["block"] == block) == rows
    for row, carriers in enumerate([] if is_tied else derived["carriers"]):
        later = list(accumulate(exits[row:], max))
        firsts = [next((row + i for i, deepest in enumerate(later) if deepest >= block), None) for block in (1, 2, 3)]
        assert carriers == firsts


def tab_to(visit: Visit, name: str) -> None:
    """Press Tab until the element has the focus, at most five times."""
    for _ in range(5):
        visit.page.keyboard.press("Tab")
        if visit.page.evaluate("document.activeElement.id") == name:
            return
    raise AssertionError(f"{name} is not reached")


@pytest.mark.usefixtures("unhurried")
def test_the_page_works_with_the_keyboard_alone(visit):
    page = visit.page
    press = page.keyboard.press
    expect(page.locator("#model")).not_to_be_empty()
    tab_to(visit, "prompt")
    press("Control+a")
    page.keyboard.type("The old king")
    visit.page.get_by_text("Settings").press("Enter")
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
def test_the_buttons_work_by_keyboard(visit):
    visit.page.focus("#send")
    visit.page.keyboard.press("Enter")
    expect(visit.tokens.nth(3)).to_be_attached()
    assert visit.page.evaluate("document.activeElement.id") == "send"
    visit.page.keyboard.press("Tab")
    assert visit.page.evaluate("document.activeElement.id") == "stop"
    visit.page.keyboard.press("Enter")
    expect(visit.page.locator("#status")).to_contain_text("was stopped after")
    assert visit.page.evaluate("document.activeElement.id") == "send"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_needs_no_horizontal_scrolling(chromium, tales, scheme):
    with visiting(chromium, tales, viewport=PHONE, color_scheme=scheme, has_touch=True) as visit:
        assert visit.page.evaluate(WIDTH) == PHONE["width"]
        visit.write("Once upon a time" + "e" * 200 + " a king", seed=11, length=100)
        assert visit.page.evaluate(WIDTH) == PHONE["width"]
        visit.tokens.nth(5).tap()
        expect(visit.hint).to_contain_text("token 6 left")
        box = visit.hint.bounding_box()
        assert box and box["x"] >= 0 and box["x"] + box["width"] <= PHONE["width"]
        assert visit.page.evaluate(WIDTH) == PHONE["width"]
        visit.check()


@pytest.mark.usefixtures("unhurried")
@pytest.mark.parametrize(("motion", "moves"), [("no-preference", True), ("reduce", False)])
def test_nothing_moves_with_reduced_motion(chromium, tales, motion, moves):
    with visiting(chromium, tales, reduced_motion=motion) as visit:
        visit.ask(length=900, seed=1)
        expect(visit.tokens.nth(3)).to_be_attached()
        assert visit.page.evaluate("document.getAnimations().length > 0") == moves
        visit.page.click("#stop")
        visit.check()
