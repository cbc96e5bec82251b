"""A pseudo-random constraint: the allowed tokens depend on the last token and the number of tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random


@dataclass(frozen=True)
class Rule:
    """Allows about `share` of the tokens, at least one of the vocabulary; after `length` tokens none.

    The mask has `num_bytes`, which may be fewer or more tokens than the vocabulary.
    """

    seed: int
    vocab_size: int
    length: int = 6
    num_bytes: int = 2
    share: float = 0.4

    def __call__(self, generated: Sequence[int]) -> set[int]:
        if len(generated) >= self.length:
            return set()
        random = Random(f"{self.seed} {generated[-1:]} {len(generated)}")
        num_tokens = 8 * self.num_bytes
        known = random.randrange(min(self.vocab_size, num_tokens))
        return {known} | {token for token in range(num_tokens) if random.random() < self.share}


@dataclass
class Automaton:
    rule: Rule
    generated: list[int] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        return not self.rule(self.generated)

    def is_ready(self, seconds: float) -> bool:
        return True

    def allowed(self) -> bytes:
        return packed(self.rule(self.generated), self.rule.num_bytes)

    def advance(self, token_id: int) -> None:
        assert token_id in self.rule(self.generated)
        self.generated.append(token_id)

    def fork(self) -> "Automaton":
        return Automaton(self.rule, list(self.generated))


def packed(tokens: set[int], num_bytes: int) -> bytes:
    return sum(1 << token for token in tokens).to_bytes(num_bytes, "little")
