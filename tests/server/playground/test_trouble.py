"""What the page shows about the model, its server, and errors."""

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from playwright.sync_api import Browser, expect

from nvium_core import LoadedModel
from tests.byte_model import load_byte_model
from tests.random_models import random_model
from tests.server.live_server import live_server, slowed_down
from tests.server.playground.conftest import Visit, visiting

KEY = "sk-first-0123"


@contextmanager
def visiting_own(browser: Browser, model: LoadedModel, **options: Any) -> Iterator[Visit]:
    """Visit a server with other options. Ignore the browser's messages about failed requests."""
    with live_server(model, **options) as server, visiting(browser, server) as visit:
        yield visit
        visit.complaints = [text for text in visit.complaints if not text.startswith("Failed to load resource")]
        visit.check()


def test_the_page_sends_the_key_and_does_not_store_it(chromium, byte_model):
    with visiting_own(chromium, byte_model, api_keys=KEY) as visit:
        assert "requires an API key" in visit.trouble()
        expect(visit.page.locator("#key")).to_have_attribute("placeholder", "needed")
        visit.ask(length=3)
        assert "requires an API key" in visit.trouble()
        for wrong in ("sk-wrong", "sk-\u20ac", "two words"):
            visit.ask(length=3, key=wrong)
            expect(visit.page.locator("#trouble")).to_contain_text("does not accept this API key")
            visit.ask(length=3, key="")
            expect(visit.page.locator("#trouble")).to_contain_text("requires an API key")
        visit.write(length=3, key=KEY)
        assert visit.tokens.count() == 3
        assert visit.page.locator("#trouble").text_content() == ""
        assert visit.page.locator("#model").inner_text().startswith("bytes, 4 layers, exits after layers 1, 2 and 4")
        kept = "[JSON.stringify(localStorage), sessionStorage.length, document.cookie, location.href]"
        stored, *others = visit.page.evaluate(kept)
        assert KEY not in stored
        assert others == [0, "", f"{visit.server.url}/"]
        visit.page.reload()
        assert visit.page.input_value("#key") == ""


def test_a_refusal_shows_the_servers_message(visit):
    visit.ask(length=1024)
    trouble = visit.trouble()
    assert trouble.startswith("The server refused this: ")
    assert "1024" in trouble and trouble.endswith(".")
    assert visit.status() == ""
    visit.write(length=2)
    assert visit.page.locator("#trouble").text_content() == ""
    visit.complaints.remove("Failed to load resource: the server responded with a status of 400 (Bad Request)")


def test_an_invalid_value_is_shown_and_not_sent(visit):
    num_requests = len(visit.requests)
    assert visit.page.locator("#temperature").is_hidden()
    visit.ask(temperature=3)
    visit.page.get_by_text("Settings").click()
    expect(visit.page.locator("#temperature")).to_be_hidden()
    visit.page.click("#send")
    expect(visit.page.locator("#temperature")).to_be_visible()
    assert visit.page.eval_on_selector("#temperature", "field => field.validity.rangeOverflow")
    assert len(visit.requests) == num_requests
    visit.write(temperature=2, length=2)
    assert len(visit.requests) > num_requests


def test_the_error_of_a_full_server_says_when_to_retry(chromium, byte_model):
    with visiting_own(chromium, byte_model, max_sequences=1, max_queue=0) as visit:
        slowed_down(visit.server)
        body = {"model": "default", "prompt": "a", "max_tokens": 4000, "ignore_eos": True, "stream": True}
        with visit.server.http.stream("POST", "/v1/completions", json=body):
            visit.ask(length=3)
            assert "is busy" in visit.trouble()
            assert "Try again in " in visit.trouble()


def test_a_server_that_has_stopped_is_reported(chromium, byte_model):
    with ExitStack() as running:
        server = running.enter_context(live_server(byte_model))
        with visiting(chromium, server) as visit:
            slowed_down(server)
            visit.ask(length=4000, seed=1)
            expect(visit.tokens.nth(2)).to_be_attached()
            running.close()
            assert visit.trouble().startswith("The stream ended early")
            assert visit.page.locator("#run.writing").count() == 0
            assert visit.page.locator("#stop").is_disabled()
            visit.ask(length=3)
            expect(visit.page.locator("#trouble")).to_have_text("The server cannot be reached. Is it still running?")


def test_an_error_event_in_a_stream_is_reported(chromium, byte_model):
    with live_server(byte_model) as server, visiting(chromium, server) as visit:
        slowed_down(server, num_steps=9)
        visit.ask(length=4000, seed=1)
        assert visit.trouble().startswith("The server failed while answering: ")
        assert visit.tokens.count() > 0
        visit.check()


def test_the_page_of_a_dense_model_does_not_mention_exits(chromium):
    dense = LoadedModel("dense", random_model([4], vocab_size=257, context=128), load_byte_model().tokenizer)
    with visiting_own(chromium, dense) as visit:
        expect(visit.page.locator("#model")).to_have_text("dense, 4 layers")
        visit.write(length=5)
        visit.tokens.nth(1).hover()
        expect(visit.hint).to_be_visible()
        assert "exit" not in visit.page.locator("body").inner_text().lower()
        assert "depth" not in visit.page.locator("body").inner_text().lower()
        assert visit.tokens.count() == 5


def test_the_page_of_a_looped_model_counts_in_loops(chromium):
    model = random_model([2, 4, 6], num_loops=3, vocab_size=257, context=128)
    with visiting_own(chromium, LoadedModel("loops", model, load_byte_model().tokenizer)) as visit:
        visit.write(length=40, seed=1)
        expect(visit.page.locator("h1")).to_have_text("Easy tokens need fewer loops", use_inner_text=True)
        assert visit.page.locator("#run .names li").all_inner_texts() == ["loop 3", "loop 2", "loop 1"]
        expect(visit.page.locator("#run .figures")).to_contain_text("Loops per token")
        visit.page.locator("#output [data-exit='1']").first.hover()
        expect(visit.hint).to_contain_text(re.compile(r"after loop 1 of 3.*loop 2 was"))
        assert "block" not in visit.page.locator("#run").inner_text()


def test_the_fields_show_the_models_suggestions_and_that_no_key_is_needed(visit):
    expect(visit.page.locator("#key")).to_have_attribute("placeholder", "not needed")
    expect(visit.page.locator("#temperature")).to_have_value("0.7")
    expect(visit.page.locator("#top-p")).to_have_value("0.95")
