"""What the page shows about the model and its server."""

from playwright.sync_api import Browser, expect

from nvium_core import LoadedModel
from tests.byte_model import load_byte_model
from tests.random_models import random_model
from tests.server.playground.test_trouble import visiting_own
from tests.server.playground.visit import Visit


def test_the_page_of_a_dense_model_does_not_mention_exits(chromium: Browser) -> None:
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


def test_the_sampling_fields_show_the_models_suggestions(visit: Visit) -> None:
    expect(visit.page.locator("#temperature")).to_have_value("0.7")
    expect(visit.page.locator("#top-p")).to_have_value("0.95")


def test_the_key_field_shows_whether_a_key_is_needed(chromium: Browser, byte_model: LoadedModel, visit: Visit) -> None:
    expect(visit.page.locator("#key")).to_have_attribute("placeholder", "not needed")
    with visiting_own(chromium, byte_model, api_keys="sk-first-0123") as asked:
        expect(asked.page.locator("#key")).to_have_attribute("placeholder", "needed")
        asked.trouble()
