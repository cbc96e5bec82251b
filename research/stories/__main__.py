"""Generate stories for reading and comparison, from openings and requests that are not in the training data.

    python -m research.stories MODEL [OTHER] --markdown stories.md --json stories.json

Without MODEL, the bundled model generates the stories. Other openings and subjects (`--material`) are in
fresh_stories.yaml. Those of thing_stories.yaml, fresh_things.yaml and unseen.yaml have a thing, to which a story should
return. Only those of unseen.yaml did not help to choose the bundled model.
"""

import re
from argparse import ArgumentParser
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import yaml
from rich.console import Console

from nvium_core.bench.figures import Figures, write_json
from nvium_core.engine.config import EngineConfig
from nvium_core.engine.engine import Engine
from nvium_core.engine.events import Completion
from nvium_core.engine.sampling_params import SamplingParams
from nvium_core.evaluation.suite import description
from nvium_core.loading import LoadedModel, load_model
from nvium_core.training.caveats import warnings
from nvium_core.training.data.texts import documents_of, prompt_tokens, user
from research.tales.filters import WORD, forms, halves, keeps_hero, keeps_pronoun, repeats_a_sentence, returns_to

MATERIAL = Path(__file__).with_name("stories.yaml")
TALES = Path(__file__).parents[2] / "data" / "tales" / "tales.txt.xz"
NOUNS = [Path(__file__).parents[1] / "tales" / name for name in ("plots.yaml", "asked.yaml")]
TEMPERATURE, TOP_P = 0.7, 0.95
MAX_TOKENS = 400


@dataclass(frozen=True, slots=True)
class Story:
    """A story that continues `opening`. `ended` means that it ended with end-of-text. `thing` is the opening's."""

    hero: str
    opening: str
    text: str
    ended: bool
    thing: str | None = None

    @property
    def keeps_its_hero(self) -> bool:
        return keeps_hero(self.hero, self.text)

    @property
    def keeps_its_pronoun(self) -> bool:
        """True if most pronouns have the gender of the opening's, and those of both halves the same gender."""
        return keeps_pronoun(self.opening, self.text) and keeps_pronoun(*halves(f"{self.opening} {self.text}"))


@cache
def material(file: Path = MATERIAL) -> dict[str, Any]:
    read: dict[str, Any] = yaml.safe_load(file.read_text(encoding="utf-8"))
    return read


def continue_openings(
    loaded: LoadedModel,
    openings: dict[str, str],
    things: Mapping[str, str],
    max_tokens: int = MAX_TOKENS,
    first_seed: int = 0,
) -> list[Story]:
    """Continue the opening of each hero. `openings` and `things` map heroes to openings and their things."""
    prompts = [list(loaded.tokenizer(opening).input_ids) for opening in openings.values()]
    generated = completions(loaded, prompts, max_tokens, first_seed)
    return [
        Story(hero, opening, decoded(loaded, each), each.finish_reason == "stop", things.get(hero))
        for (hero, opening), each in zip(openings.items(), generated, strict=True)
    ]


def answers(
    loaded: LoadedModel, subjects: Sequence[str], max_tokens: int = MAX_TOKENS, first_seed: int = 0
) -> list[str]:
    """Let the model answer one request per subject for a story about it."""
    requests = [user(material()["request"].format(subject=subject)) for subject in subjects]
    prompts = [prompt_tokens([request], loaded.tokenizer) for request in requests]
    return [decoded(loaded, each) for each in completions(loaded, prompts, max_tokens, first_seed)]


def completions(
    loaded: LoadedModel, prompts: Sequence[list[int]], max_tokens: int, first_seed: int
) -> list[Completion]:
    """Complete the prompts, each with its own seed. If a prompt fails, raise its error."""
    engine = Engine(loaded.model, EngineConfig(max_sequences=8))
    for number, prompt in enumerate(prompts):
        seed = first_seed + number
        params = SamplingParams(max_tokens=max_tokens, temperature=TEMPERATURE, top_p=TOP_P, seed=seed)
        engine.add(str(number), prompt, params)
    completed = [Completion() for _ in prompts]
    for event in engine.run():
        completed[int(event.request_id)].append(event)
    return completed


def decoded(loaded: LoadedModel, completion: Completion) -> str:
    return str(loaded.tokenizer.decode(completion.token_ids, skip_special_tokens=True)).strip()


def keeps_to(subject: str, answer: str) -> bool:
    """Return True if the answer contains the subject's noun or its plural."""
    *_, noun = subject.split()
    return not forms(noun).isdisjoint(word.lower().removesuffix("'s") for word in WORD.findall(answer))


COUNTS: dict[str, Callable[[Story], bool]] = {
    "keep_their_hero": lambda story: story.keeps_its_hero,
    "end": lambda story: story.ended,
    "repeat_a_sentence": lambda story: repeats_a_sentence(story.text),
    "keep_their_pronoun": lambda story: story.keeps_its_pronoun,
    "return_to_their_thing": lambda story: story.thing is not None and returns_to(story.thing, story.text),
}


@cache
def trained_words() -> frozenset[str]:
    """Return the words of the tales, and the nouns that were put into them for training."""
    texts = [*documents_of(TALES), *(file.read_text(encoding="utf-8") for file in NOUNS)]
    return frozenset(word.lower().removesuffix("'s") for text in texts for word in WORD.findall(text))


def unknown_words_per_thousand(by_prompt: Sequence[tuple[str, str]]) -> float:
    """Return how many words in a thousand are in lower case, and neither in the tales nor in the prompt."""
    num_words = num_unknown = 0
    for prompt, text in by_prompt:
        words, known = WORD.findall(text), trained_words().union(WORD.findall(prompt))
        num_words += len(words)
        num_unknown += sum(word.islower() and word.removesuffix("'s") not in known for word in words)
    return 1000 * num_unknown / max(1, num_words)


def figures(loaded: LoadedModel, stories: Sequence[Story], subjects: Sequence[str], texts: Sequence[str]) -> Figures:
    by_prompt = [*((story.opening, story.text) for story in stories), *zip(subjects, texts, strict=True)]
    kept = sum(keeps_to(subject, answer) for subject, answer in zip(subjects, texts, strict=True))
    counts = {name: sum(map(holds, stories)) for name, holds in COUNTS.items()}
    return {
        **description(loaded),
        "temperature": TEMPERATURE,
        "top_p": TOP_P,
        "num_stories": len(stories),
        "num_with_a_thing": sum(story.thing is not None for story in stories),
        **counts,
        "intervals": {name: interval(count, len(stories)) for name, count in counts.items()},
        "unknown_words_per_thousand": unknown_words_per_thousand(by_prompt),
        "median_words": median(len(WORD.findall(story.text)) for story in stories),
        "num_asked": len(subjects),
        "keep_to_their_subject": kept,
    }


def interval(count: int, number: int) -> list[float]:
    """Return Wilson's 95% interval of a count."""
    z2 = 1.96**2
    middle, width = count + z2 / 2, (z2 * (count * (1 - count / number) + z2 / 4)) ** 0.5
    return [number * (middle - width) / (number + z2), number * (middle + width) / (number + z2)]


def as_markdown(by_model: dict[str, list[Story]], answered: dict[str, dict[str, str]]) -> str:
    """Format the models' stories by opening, then their answers by subject."""
    first, *_ = by_model.values()
    parts = ["# Stories\n\nAll generated stories; none is left out.\n"]
    for number, story in enumerate(first):
        parts.append(f"\n## {number + 1}. {story.opening}\n")
        for name, stories in by_model.items():
            own = stories[number]
            parts.append(f"\n**{name}**{'' if own.ended else ', cut off'}\n\n> … {quoted(own.text)}\n")
    for subject in next(iter(answered.values())):
        parts.append(f"\n## A story about {subject}\n")
        parts += [f"\n**{name}**\n\n> {quoted(given[subject])}\n" for name, given in answered.items()]
    return "".join(parts)


def quoted(text: str) -> str:
    return re.sub(r"\s*\n\s*", "\n> \n> ", text)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(prog="python -m research.stories", description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=[None])
    parser.add_argument(
        "--material", type=Path, default=MATERIAL, help="file with openings and subjects [stories.yaml]"
    )
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--openings", type=int, help="number of openings [all]")
    parser.add_argument("--subjects", type=int, help="number of subjects [all]")
    parser.add_argument("--max-tokens", type=int, default=MAX_TOKENS)
    parser.add_argument("--first-seed", type=int, default=0, help="seed of the first story; the next has the next [0]")
    args = parser.parse_args(arguments)
    chosen = material(args.material)
    openings = dict([*chosen["openings"].items()][: args.openings])
    subjects = chosen.get("subjects", [])[: args.subjects]
    stories, answered, found = dict[str, list[Story]](), dict[str, dict[str, str]](), list[Figures]()
    for name in args.models:
        loaded = load_model(name, "cpu")
        limits = args.max_tokens, args.first_seed
        stories[loaded.name] = continue_openings(loaded, openings, chosen.get("things", {}), *limits)
        texts = answers(loaded, subjects, *limits)
        answered[loaded.name] = dict(zip(subjects, texts, strict=True))
        own = figures(loaded, stories[loaded.name], subjects, texts)
        found.append({**own, "max_tokens": args.max_tokens, "first_seed": args.first_seed})
        counts = {name: own[name] for name in (*COUNTS, "keep_to_their_subject")}
        Console().print(loaded.name, counts, *warnings(own))
    if args.markdown:
        args.markdown.write_text(as_markdown(stories, answered), encoding="utf-8")
    if args.json:
        write_json(found, args.json)


if __name__ == "__main__":
    main()
