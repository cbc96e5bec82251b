"""Parts of the page that other tests meet only by chance, each called as a module of the page."""

from playwright.sync_api import Browser

from tests.server.live_server import LiveServer
from tests.server.playground.visit import Visit, visiting

EVENTS_OF_EVERY_SPLIT = """async (text) => {
    const { events } = await import("/assets/events.js");
    const bytes = new TextEncoder().encode(text);
    const read = [];
    for (let at = 0; at <= bytes.length; at++) {
        const data = [];
        const pieces = [bytes.slice(0, at), bytes.slice(at)].filter((piece) => piece.length);
        for await (const event of events(ReadableStream.from(pieces))) data.push(event);
        read.push(data);
    }
    return read;
}"""

SPANS_OF = """async (chunks) => {
    const { Story } = await import("/assets/story.js");
    const output = document.createElement("p");
    const story = new Story(output, () => {});
    for (const [text, exits] of chunks) story.add(text, exits);
    return [output.textContent, [...output.children].map((span) => [span.textContent, span.dataset.exit, span.dataset.tone])];
}"""

BREAK_THE_POLICY = """async () => {
    const style = document.createElement("p");
    style.setAttribute("style", "color: red");
    document.body.append(style);
    const reached = await fetch("https://elsewhere.example/").then(() => true, () => false);
    let ran = false;
    try { document.body.innerHTML = "<b>text</b>"; ran = true; } catch { /* refused */ }
    return [reached, ran];
}"""


def test_events_are_read_wherever_their_bytes_are_cut(visit: Visit) -> None:
    text = ': keep-alive\n\ndata: {"a": "b\u00fc\U0001f98a"}\n\n: keep-alive\n\ndata: [DONE]\n\n'
    read = visit.page.evaluate(EVENTS_OF_EVERY_SPLIT, text)
    assert len(read) == len(text.encode()) + 1
    assert all(data == ['{"a": "b\u00fc\U0001f98a"}', "[DONE]"] for data in read)


def test_every_token_has_one_span_whatever_chunks_hold(visit: Visit) -> None:
    chunks = [["", []], ["Once", [1]], ["", [2]], [" upon a", [3, 1, 4]], ["", []], [" time", []], ["", [7]]]
    text, spans = visit.page.evaluate(SPANS_OF, chunks)
    assert text == "Once upon a time" == "".join(span[0] for span in spans)
    assert spans == [
        ["Once", "1", "1"],
        ["", "2", "2"],
        ["", "3", "3"],
        ["", "1", "1"],
        [" upon a time", "4", "4"],
        ["", "7", "1"],
    ]


def test_what_the_policy_forbids_does_not_happen_and_would_be_noticed(chromium: Browser, tales: LiveServer) -> None:
    with visiting(chromium, tales) as visit:
        assert visit.page.evaluate(BREAK_THE_POLICY) == [False, False]
        told = "\n".join(visit.complaints)
        for directive in ("style-src-attr", "connect-src", "require-trusted-types-for"):
            assert f"refused by {directive}" in told
