"""Tests of the page's JavaScript modules."""

from tests.server.playground.conftest import visiting

EVENTS_OF_EVERY_SPLIT = """async (text) => {
    const { events } = await import("/assets/api.js");
    const bytes = new TextEncoder().encode(text);
    const read = [];
    for (let at = 0; at <= bytes.length; at++) {
        const data = [];
        const body = new ReadableStream({
            start(controller) {
                controller.enqueue(bytes.slice(0, at));
                controller.enqueue(bytes.slice(at));
                controller.close();
            },
        });
        for await (const event of events(body)) data.push(event);
        read.push(data);
    }
    return read;
}"""

SPANS_OF = """async (chunks) => {
    const { Story } = await import("/assets/story.js");
    const output = document.createElement("p");
    const story = new Story(output, () => {});
    for (const chunk of chunks) story.add(...chunk);
    const spans = [...output.children];
    return [output.textContent, spans.map(({ textContent, dataset }) => [textContent, dataset.exit, dataset.tone])];
}"""

SPEED_OF = """async ([numTokens, milliseconds]) => {
    const { Figures } = await import("/assets/figures.js");
    const place = document.createElement("dl");
    const figures = new Figures(place, { unit: "layer", depths: [1, 2] }, 0);
    figures.add(1, 10);
    figures.add(numTokens, 10 + milliseconds);
    figures.show([1 + numTokens, 0]);
    return place.querySelectorAll(".value")[1].textContent;
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


def test_events_are_parsed_wherever_their_bytes_are_cut(visit):
    text = ': keep-alive\n\ndata: {"a": "b\u00fc\U0001f98a"}\n\n: keep-alive\n\ndata: [DONE]\n\n'
    read = visit.page.evaluate(EVENTS_OF_EVERY_SPLIT, text)
    assert len(read) == len(text.encode()) + 1
    assert all(data == ['{"a": "b\u00fc\U0001f98a"}', "[DONE]"] for data in read)


def test_every_token_has_one_span_however_chunks_are_cut(visit):
    several = [["A 🦊", [1, 2], [0, 1]], [" up", [3, 4], [3, 6]], ["", [1], [6]], ["", [], []]]
    held_back = [["on", [2], [8]], [" a time", [], []], ["", [7], [20]]]
    text, spans = visit.page.evaluate(SPANS_OF, several + held_back)
    assert text == "A 🦊 upon a time"
    assert [text for text, *_ in spans] == ["A", " 🦊", " up", "", "on", " a time", ""]
    assert [exit_ for _, exit_, _ in spans] == [*"1234127"]
    assert [tone for *_, tone in spans] == [*"1234121"]


def test_the_browser_blocks_and_reports_violations_of_the_policy(chromium, tales):
    with visiting(chromium, tales) as visit:
        assert visit.page.evaluate(BREAK_THE_POLICY) == [False, False]
        complaints = "\n".join(visit.complaints)
        for directive in ("style-src", "connect-src", "TrustedHTML"):
            assert directive in complaints


def test_a_short_run_has_no_speed(visit):
    speeds = [visit.page.evaluate(SPEED_OF, run) for run in ([10, 0], [10, 900], [500, 1], [20, 100])]
    assert speeds == ["–", "–", "–", "200 tokens/s"]
