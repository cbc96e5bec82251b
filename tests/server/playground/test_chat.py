"""The chat tab, and a model without early exits."""

from playwright.sync_api import Browser, expect

from nvium_core import LoadedModel
from tests.byte_model import load_byte_model
from tests.random_models import random_model
from tests.server.live_server import LiveServer
from tests.server.playground.test_trouble import visiting_own
from tests.server.playground.visit import SECONDS, Visit

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
    visit.page.eval_on_selector("#settings", "settings => settings.open = true")
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


def test_a_conversation_goes_through_the_template_and_can_be_regenerated(visit: Visit) -> None:
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


def test_markdown_becomes_elements_and_nothing_of_it_is_html(visit: Visit) -> None:
    names, text = visit.page.evaluate(ELEMENTS_OF, MARKDOWN)
    assert names == ["h3", "p", "strong", "em", "code", "ul", "li", "li", "ol", "li", "pre", "code"]
    assert "<b>code</b>" in text
    assert "a*b*" in text
    for end in range(len(MARKDOWN)):
        visit.page.evaluate(ELEMENTS_OF, MARKDOWN[:end])


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


def test_sampling_is_as_the_model_suggests(visit: Visit) -> None:
    expect(visit.page.locator("#temperature")).to_have_value("0.7")
    expect(visit.page.locator("#top-p")).to_have_value("0.95")


def test_the_field_says_whether_a_key_is_needed(chromium: Browser, byte_model: LoadedModel, visit: Visit) -> None:
    expect(visit.page.locator("#key")).to_have_attribute("placeholder", "not needed")
    with visiting_own(chromium, byte_model, api_keys="sk-first-0123") as asked:
        expect(asked.page.locator("#key")).to_have_attribute("placeholder", "needed")
        asked.trouble()
