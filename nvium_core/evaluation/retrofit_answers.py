"""Plain questions to a retrofitted chat model at temperature 0: its original's answers, and its mixture's by depth."""

import re
from collections.abc import Sequence

from nvium_core.bench.harness import Figures
from nvium_core.choices import Sampling
from nvium_core.engine.engine import Engine
from nvium_core.engine.params import EngineConfig, SamplingParams
from nvium_core.loading import LoadedModel
from nvium_core.training.chat.conversations import user
from nvium_core.training.chat.examples import prompt_tokens
from nvium_core.training.retrofitting.steering import shifted

QUESTIONS = {
    "What is the capital of France?": "Paris",
    "How many days are there in a week?": "seven|7",
    "What colour is the sky on a clear day?": "blue",
    "Which planet do we live on?": "Earth",
    "What do bees make that people eat?": "honey",
    "What is two plus three?": "five|5",
    "What is frozen water called?": "ice",
    "Which season comes after winter?": "spring",
    "Which animal says meow?": "cats?",
    "What is the opposite of hot?": "cold",
}
"""And a word that a right answer has."""

MAX_TOKENS = 48


def answers(loaded: LoadedModel, points: Sequence[Figures], source: LoadedModel) -> Figures:
    """Of the original, which is the last exit of `source`, and of the mixture with the routers of every point."""
    original = answered(source, "original")
    rows = []
    for point in points:
        with shifted(loaded.model, point["shift"]):
            given = answered(loaded, "exits")
        equal = sum(one == other for one, other in zip(given, original, strict=True))
        rows.append({"depth": point["depth"], "equal": equal, "right": num_right(given), "answers": given})
    return {
        "max_tokens": MAX_TOKENS,
        "questions": list(QUESTIONS),
        "original": {"right": num_right(original), "answers": original},
        "mixture": rows,
    }


def answered(loaded: LoadedModel, sampling: Sampling) -> list[str]:
    ends = (loaded.tokenizer.eos_token_id,)
    asked = SamplingParams(max_tokens=MAX_TOKENS, temperature=0, sampling=sampling, stop_token_ids=ends)
    engine = Engine(loaded.model, EngineConfig(max_sequences=len(QUESTIONS)))
    said = engine.generate([prompt_tokens([user(question)], loaded.tokenizer) for question in QUESTIONS], asked)
    return [str(loaded.tokenizer.decode(each.token_ids, skip_special_tokens=True)).strip() for each in said]


def num_right(given: Sequence[str]) -> int:
    pairs = zip(QUESTIONS.values(), given, strict=True)
    return sum(bool(re.search(rf"\b(?:{word})\b", answer, re.IGNORECASE)) for word, answer in pairs)
