"""Requests from pages of other sites, and after DNS rebinding, in a real browser."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page

from tests.server.live_server import LiveServer

ATTEMPTS = """async target => {
    const body = JSON.stringify({ model: "default", prompt: "Once", max_tokens: 1 });
    const send = (mode, body, headers) => fetch(`${target}/v1/completions`, { method: "POST", mode, body, headers });
    const attempts = [
        () => send("no-cors", body),
        () => send("no-cors", new URLSearchParams({ [body]: "" })),
        () => send("no-cors", new Blob([body])),
        () => send("cors", body),
        () => send("cors", body, { "content-type": "application/json" }),
        () => fetch(`${target}/v1/models`),
        () => fetch(`${target}/metrics`, { mode: "no-cors" }),
    ];
    const read = [];
    for (const attempt of attempts) {
        try {
            read.push(await (await attempt()).text());
        } catch {
            read.push("");
        }
    }
    return read;
}"""
COMPLETED = 'nvium_requests_total{endpoint="completions",outcome="completed"}'
REJECTED = 'nvium_rejected_total{reason="origin_not_allowed"}'
FORM = """target => {
    const form = document.createElement("form");
    Object.assign(form, { method: "POST", enctype: "text/plain", action: `${target}/v1/completions` });
    const field = document.createElement("input");
    Object.assign(field, { name: '{"model": "default", "prompt": "', value: '", "max_tokens": 1}' });
    form.append(field);
    document.body.append(form);
    form.submit();
}"""


@pytest.fixture
def evil(chromium: Browser, tales: LiveServer) -> Iterator[Page]:
    """A page at http://evil.example, at the server's port."""
    with chromium.new_page() as page:
        page.route("**/attack", lambda route: route.fulfill(content_type="text/html", body="<body></body>"))
        page.goto(f"http://evil.example:{tales.http.base_url.port}/attack")
        yield page


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost"])
def test_a_page_of_another_site_can_neither_call_nor_read(evil, tales, name):
    before, rejected = tales.gauge(COMPLETED), tales.gauge(REJECTED)
    target = f"http://{name}:{tales.http.base_url.port}"
    assert evil.evaluate(ATTEMPTS, target) == [""] * 7
    with evil.expect_navigation():
        evil.evaluate(FORM, target)
    assert "origin_not_allowed" in evil.content()
    assert tales.gauge(COMPLETED) == before
    assert tales.gauge(REJECTED) >= rejected + 6


def test_a_page_under_a_rebound_name_reads_only_the_refusal(evil, tales):
    before, target = tales.gauge(COMPLETED), f"http://evil.example:{tales.http.base_url.port}"
    for answer in evil.evaluate(ATTEMPTS, target):
        assert "host_not_allowed" in answer
    assert tales.gauge(COMPLETED) == before


def test_the_playground_may_call_its_server(chromium, tales):
    with chromium.new_page() as page:
        page.goto(tales.url)
        assert "playground" in page.title().lower() or page.locator("#prompt").is_visible()
        *_, as_json, models, _metrics = page.evaluate(ATTEMPTS, tales.url)
        assert '"completion_tokens":1' in as_json.replace(" ", "")
        assert "max_model_len" in models
