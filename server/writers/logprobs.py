"""Formats log-probabilities (log π_mix) as OpenAI does.

Lists with alternatives are generators, because a long list would take much memory and pause all threads.
"""

from collections.abc import Iterator, Sequence

from nvium_core import Score, TokenEvent
from nvium_core.text.token_bytes import TokenBytes
from server.schemas.chat import TokenLogprob, TopLogprob
from server.schemas.completions import CompletionLogprobs

MIN_LOGPROB = -9999.0  # replaces log 0: JSON has no infinity


def completion_logprobs(
    vocabulary: TokenBytes,
    token_ids: Sequence[int],
    scores: Sequence[Score | None],
    text_offsets: Sequence[int],
    num_alternatives: int,
) -> CompletionLogprobs:
    """Return the arrays of `/v1/completions`, with null for tokens without a score."""
    return {
        "tokens": [vocabulary.name(token_id) for token_id in token_ids],
        "token_logprobs": [None if score is None else clamped(score.logprob) for score in scores],
        "top_logprobs": (
            None if score is None else alternatives(vocabulary, token_id, score, num_alternatives)
            for token_id, score in zip(token_ids, scores, strict=True)
        ),
        "text_offset": list(text_offsets),
    }


def alternatives(vocabulary: TokenBytes, token_id: int, score: Score, num_alternatives: int) -> dict[str, float]:
    """Return the log-probabilities of the token and its alternatives by token name, in descending order."""
    by_id = dict(score.top[:num_alternatives])
    by_id.setdefault(token_id, score.logprob)
    best: dict[str, float] = {}
    for candidate, logprob in sorted(by_id.items(), key=lambda item: -item[1]):
        best.setdefault(vocabulary.name(candidate), clamped(logprob))
    return best


def chat_logprobs(
    vocabulary: TokenBytes, tokens: Sequence[TokenEvent], num_alternatives: int
) -> Iterator[TokenLogprob]:
    """Yield the entries of `/v1/chat/completions`, each with `num_alternatives` alternatives."""
    for token in tokens:
        if score := token.score:
            top = [entry(vocabulary, *other) for other in score.top[:num_alternatives]]
            yield {**entry(vocabulary, token.token_id, score.logprob), "top_logprobs": top}


def entry(vocabulary: TokenBytes, token_id: int, logprob: float) -> TopLogprob:
    return {"token": vocabulary.name(token_id), "logprob": clamped(logprob), "bytes": list(vocabulary[token_id])}


def clamped(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)
