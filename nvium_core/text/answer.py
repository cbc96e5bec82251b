"""The text of one answer, token by token, up to its stop string."""

from collections.abc import Sequence

from tokenizers import Tokenizer

from nvium_core.text.detokenizer import Detokenizer, StopStrings


class AnswerText:
    """Detokenizes an answer and finds its stop string, after which `is_stopped` is true and tokens add no text."""

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int], stops: Sequence[str] = (), *, include_stop: bool = False
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, prompt_ids)
        self._stops = StopStrings(stops, include=include_stop)

    @property
    def is_stopped(self) -> bool:
        return self._stops.matched is not None

    def push(self, token_id: int, *, is_silent: bool = False, is_last: bool = False) -> str:
        """Add a token and return the text that can be emitted. `is_silent` tokens (end-of-text) have no text."""
        text = "" if is_silent else self._detokenizer.push(token_id)
        if is_last:
            text += self._detokenizer.flush()
        text = self._stops.push(text)
        return text + self._stops.flush() if is_last else text
