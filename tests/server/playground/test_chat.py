"""The chat tab, what is remembered between visits, and a model without early exits."""

import json

from playwright.sync_api import Browser, expect

from nvium_core import LoadedModel
from tests.byte_model import load_byte_model
from tests.random_models import random_model
from tests.server.live_server import LiveServer
from tests.server.playground.test_trouble import visiting_own
from tests.server.playground.visit import SECONDS, Visit, visiting

TURNS = "#messages .turn"
MARKDOWN = """# Tale
One **bold** and *light* `a*b*` word.

- fox
- crow

1. first
```
<b>code</b>
```
"""
ELEMENTS_OF = """async (text) => {
    const { rendered } = await import("/assets/markdown.js");
    const place = document.createElement("div");
    place.append(...rendered(text));
    return [[...place.querySelectorAll("*")].map(({ tagName }) => tagName.toLowerCase()), place.textContent];
}"""


def open_chat(visit: Visit, **settings: object) -> None:
    for name, value in settings.items():
        visit.page.fill(f"#{name}", str(value))
    visit.page.click("#chat-tab")


def say(visit: Visit, words: str) -> None:
    visit.page.fill("#message", words)
    visit.page.click("#say")
    settled(visit)


def settled(visit: Visit) -> None:
    """The last answer has come to its end."""
    visit.page.locator(f"{TURNS}:last-child .quiet", has_text="token").wait_for(timeout=1000 * SECONDS)
    expect(visit.page.locator("#hush")).to_be_disabled(timeout=1000 * SECONDS)


def turns(visit: Visit) -> list[tuple[str, str]]:
    read = "turns => turns.map(turn => [turn.dataset.role, turn.querySelector('.text').innerText])"
    return [(role, text) for role, text in visit.page.locator(TURNS).evaluate_all(read)]


def answer(server: LiveServer, messages: list[dict[str, str]]) -> str:
    body = {"model": "default", "messages": messages, "seed": 5, "max_tokens": 12, "temperature": 0.7, "top_p": 0.95}
    text: str = server.http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    return text


def test_a_conversation_goes_through_the_template_and_can_be_edited_and_asked_again(visit: Visit) -> None:
    open_chat(visit, seed=5, length=12)
    visit.page.fill("#system", "You tell tales.")
    say(visit, "A fox, please.")
    said = [{"role": "system", "content": "You tell tales."}, {"role": "user", "content": "A fox, please."}]
    first = answer(visit.server, said)
    assert [(role, " ".join(text.split())) for role, text in turns(visit)] == [
        ("user", "A fox, please."),
        ("assistant", " ".join(first.split())),
    ]
    expect(visit.page.locator(f"{TURNS}:last-child .quiet")).to_contain_text("12 tokens, mean depth 0.")
    say(visit, "More.")
    assert len(turns(visit)) == 4
    visit.page.locator(TURNS).nth(1).get_by_text("Regenerate").click()
    settled(visit)
    assert [role for role, _ in turns(visit)] == ["user", "assistant"]
    visit.page.locator(TURNS).nth(0).get_by_text("Edit").click()
    expect(visit.page.locator("#message")).to_have_value("A fox, please.")
    assert turns(visit) == []


def test_markdown_becomes_elements_and_nothing_of_it_is_html(visit: Visit) -> None:
    names, text = visit.page.evaluate(ELEMENTS_OF, MARKDOWN)
    assert names == ["h3", "p", "strong", "em", "code", "ul", "li", "li", "ol", "li", "pre", "code"]
    assert "<b>code</b>" in text
    assert "a*b*" in text
    for end in range(len(MARKDOWN)):
        visit.page.evaluate(ELEMENTS_OF, MARKDOWN[:end])


def test_settings_are_there_again_and_a_key_is_not_kept(chromium: Browser, tales: LiveServer) -> None:
    with visiting(chromium, tales) as visit:
        temperature = visit.page.locator("#temperature")
        expect(temperature).to_have_value("0.7")
        expect(visit.page.locator("#top-p")).to_have_value("0.95")
        temperature.fill("0.4")
        visit.page.fill("#key", "sk-secret")
        visit.page.check("#numbers")
        kept = visit.page.evaluate("JSON.stringify(localStorage)")
        assert "sk-secret" not in kept
        assert json.loads(json.loads(kept)["nvium-settings"])["temperature"] == "0.4"
        visit.page.reload()
        expect(temperature).to_have_value("0.4")
        expect(visit.page.locator("#numbers")).to_be_checked()
        visit.page.evaluate("localStorage.setItem('nvium-settings', '{broken')")
        visit.page.reload()
        expect(temperature).to_have_value("0.7")


def test_of_a_dense_model_there_is_no_word_of_exits(chromium: Browser) -> None:
    tokenizer = load_byte_model().tokenizer
    dense = LoadedModel("dense", random_model([4], vocab_size=257, context=128), tokenizer)
    with visiting_own(chromium, dense) as visit:
        expect(visit.page.locator("#model")).to_have_text("dense, 4 layers")
        visit.write(length=5)
        visit.tokens.nth(1).hover()
        expect(visit.hint).to_be_visible()
        assert "exit" not in visit.page.locator("body").inner_text().lower()
        assert "depth" not in visit.page.locator("body").inner_text().lower()
        assert visit.tokens.count() == 5


def test_nothing_is_drawn_before_there_is_something_to_draw(visit: Visit) -> None:
    expect(visit.page.locator("#model")).not_to_be_empty()
    assert visit.page.locator("#runs").inner_text() == ""


def test_the_field_says_whether_a_key_is_needed(chromium: Browser, byte_model: LoadedModel, visit: Visit) -> None:
    expect(visit.page.locator("#key")).to_have_attribute("placeholder", "not needed")
    with visiting_own(chromium, byte_model, api_keys="sk-first-0123") as asked:
        expect(asked.page.locator("#key")).to_have_attribute("placeholder", "needed")
        asked.trouble()


TOPS = """[".story", ".figures", "figure"].map(
    name => document.querySelector(`#exits-run ${name}`).getBoundingClientRect().top)"""


def test_on_a_phone_the_text_comes_before_the_figures(chromium: Browser, tales: LiveServer) -> None:
    with visiting(chromium, tales, viewport={"width": 390, "height": 844}) as visit:
        visit.write(length=8)
        heights = visit.page.evaluate(TOPS)  # of one moment, since the page moves them while it fills
        assert len(heights) == 3
        assert heights == sorted(heights)
