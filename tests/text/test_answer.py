from nvium_core.text.answer import AnswerText
from tests.byte_model import byte_tokenizer, token_ids


def pushed(answer: AnswerText, text: str) -> list[str]:
    tokens = token_ids(text)
    return [answer.push(token, is_last=number == len(tokens)) for number, token in enumerate(tokens, start=1)]


def test_a_stop_string_ends_the_text() -> None:
    answer = AnswerText(byte_tokenizer(), [], ["xy"])
    assert "".join(pushed(answer, "axyb")) == "a"
    assert answer.is_stopped


def test_end_of_text_has_no_text_and_flushes_the_buffer() -> None:
    answer = AnswerText(byte_tokenizer(), [], ["xy"])
    assert pushed(answer, "ax")[:1] == ["a"]
    answer = AnswerText(byte_tokenizer(), [], ["xy"])
    assert [answer.push(token_ids("x")[0]), answer.push(0, is_silent=True, is_last=True)] == ["", "x"]
