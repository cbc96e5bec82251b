"""Prompts as tokens, and models that take turns at them. Knows no engine and no clock."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import TypeVar

from rich.progress import track
from transformers import PreTrainedTokenizerBase

from nvium_core.evaluation.spec_bench import Prompts

MAX_NEW_TOKENS = 128
TRIALS = 3

Answer = TypeVar("Answer")


@dataclass(frozen=True, kw_only=True)
class Questions:
    """Prompts by category as tokens, the length of answers, and the number of truncated prompts."""

    prompts: dict[str, list[list[int]]]
    max_new_tokens: int
    prompts_cut: int

    @property
    def counts(self) -> dict[str, int]:
        """Prompts by category."""
        return {category: len(of_category) for category, of_category in self.prompts.items()}


def questions(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Prompts,
    context: int,
    num_tokens: int = MAX_NEW_TOKENS,
    cut_end: bool = False,
) -> Questions:
    """Answers take at most half of the context. Prompts that leave no room lose their beginning, or their end."""
    num_tokens = min(num_tokens, context // 2)
    room = context - num_tokens
    kept = slice(room) if cut_end else slice(-room, None)
    whole = {category: [tokens(tokenizer, text) for text in texts] for category, texts in prompts.items()}
    cut = {category: [ids[kept] for ids in of_category] for category, of_category in whole.items()}
    num_cut = sum(len(ids) > len(rest) for name in whole for ids, rest in zip(whole[name], cut[name], strict=True))
    return Questions(prompts=cut, max_new_tokens=num_tokens, prompts_cut=num_cut)


def tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """At least one: end-of-text for an empty text."""
    return list(tokenizer(text, verbose=False).input_ids) or [tokenizer.eos_token_id]


def take_turns(
    generators: Mapping[str, Callable[[list[int], int], Answer]],
    asked: Questions,
    trials: int = TRIALS,
    show_progress: bool = True,
) -> dict[str, dict[str, list[Answer]]]:
    """Every generator's answers to every prompt in every trial, by category. All answer a prompt before the next one,
    every other time in reverse order."""
    answers: dict[str, dict[str, list[Answer]]] = {
        name: {category: [] for category in asked.prompts} for name in generators
    }
    once = [(category, prompt) for category, of_category in asked.prompts.items() for prompt in of_category]
    turns: cycle[Sequence[str]] = cycle((list(generators), list(generators)[::-1]))
    rounds = list(enumerate(once * trials))
    for seed, (category, prompt) in track(rounds, "generating", transient=True, disable=not show_progress):
        for name in next(turns):
            answers[name][category].append(generators[name](prompt, seed))
    return answers
