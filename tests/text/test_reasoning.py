import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvium_core.text.chat_template import ChatTemplate
from nvium_core.text.reasoning import CLOSING, OPENING, ReasoningAndAnswer, ReasoningParser
from tests.byte_model import load_byte_model, token_ids
from tests.text.chunks import chunks

texts = st.text(st.sampled_from("<think>/ \na<🦊"), max_size=20)
spaces = st.text(st.sampled_from(" \n"), max_size=3)
cuts = st.lists(st.integers(0, 80))


def read(parser: ReasoningParser, text: str, cuts: list[int]) -> ReasoningAndAnswer:
    pieces = [*map(parser.push, chunks(text, cuts)), parser.flush()]
    reasoning, answers = zip(*pieces, strict=True)
    return ReasoningAndAnswer("".join(reasoning), "".join(answers))


@given(spaces, texts, spaces, texts, cuts)
def test_reasoning_and_answer_do_not_depend_on_the_chunks(before, thought, after, answer, cuts):
    if CLOSING in thought + CLOSING[:-1]:
        return
    expected = ReasoningAndAnswer(thought.strip(" \n"), answer.lstrip(" \n"))
    text = f"{thought}{CLOSING}{after}{answer}"
    parser, opened = ReasoningParser(), ReasoningParser("thinking")
    assert read(parser, before + OPENING + text, cuts) == read(opened, text, cuts) == expected
    assert opened.num_characters == len(thought + CLOSING)
    assert parser.num_characters == len(before + OPENING + thought + CLOSING)


@given(texts, cuts)
def test_text_without_opening_tag_is_the_answer(text, cuts):
    assert read(ReasoningParser("answer"), text, cuts) == ("", text)
    if not text.lstrip().startswith(OPENING):
        assert read(ReasoningParser(), text, cuts) == ("", text)


@given(texts, cuts)
def test_reasoning_without_closing_tag_is_reasoning(text, cuts):
    if CLOSING not in text:
        assert read(ReasoningParser("thinking"), text, cuts) == (text.strip(" \n"), "")


@pytest.mark.parametrize(
    ("prompt", "answer", "expected"),
    [
        ("assistant\n", f"{OPENING}\nhm\n{CLOSING}\n\nyes", ("hm", "yes")),
        (f"assistant\n{OPENING}\n", f"hm\n{CLOSING}\n\nyes", ("hm", "yes")),
        (f"assistant\n{OPENING}\n\n{CLOSING}\n\n", "yes", ("", "yes")),
    ],
)
def test_an_opening_tag_in_the_prompt_is_recognised(prompt, answer, expected):
    tokenizer = load_byte_model().tokenizer
    tokenizer.chat_template = f"{OPENING}{CLOSING}"
    assert read(ChatTemplate(tokenizer).reasoning_parser(token_ids(prompt)), answer, []) == expected
