"""Training and held-out text of a retrofit: files, and conversations that the model generates itself.

In documents all tokens count, in conversations only the answers. A chat model generates its own training conversations
as in Magpie (arXiv 2406.08464): it samples a user's message after the chat template's user header, then the answer. So
exits train on the kind of text that the model will generate. Every conversation has a fixed seed, so a model always
writes the same file.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerFast

from nvium_core.engine.config import EngineConfig
from nvium_core.engine.engine import Engine
from nvium_core.engine.events import Completion
from nvium_core.engine.sampling_params import SamplingParams
from nvium_core.errors import DataError
from nvium_core.model.nvium import Nvium
from nvium_core.text.chat_template import ChatTemplate
from nvium_core.training.data.source import chat_examples, encoded
from nvium_core.training.data.texts import Conversation, Example, assistant, documents_of, holds_conversations, user

MAX_HELD_OUT, HELD_OUT_SHARE = 8_192, 0.1
"""The end of a text is held out for measuring: this share of its tokens, and at most this number."""

MAX_SEQUENCES, MAX_ROUND = 64, 256
"""Maximum number of sequences in a batch and of conversations in a round. A round has at least `MAX_SEQUENCES`."""

USUAL_TOKENS = 150  # estimated length of a conversation, used to choose the size of a round
MAX_REQUEST_TOKENS, MAX_ANSWER_TOKENS = 128, 256  # longer requests are discarded, longer answers truncated

MARK = "a text that no template has"


@dataclass(frozen=True)
class TrainingText:
    """The examples of a text, each short enough for a window. `kind` is "conversations" or "text"."""

    kind: str
    training: list[Example]
    held_out: list[Example]


def read_text(path: Path, tokenizer: PreTrainedTokenizerFast, context: int, max_tokens: int) -> TrainingText:
    """Read up to `max_tokens` training tokens of a text, and hold out its end. Raise `DataError` if it is unusable."""
    is_chat = holds_conversations(path)
    if is_chat:
        examples = chat_examples(path, tokenizer, context + 1)  # the last token is never an input
    else:
        examples = documents(path, tokenizer, context, max_tokens)
    training, held_out = split(examples, path)
    return TrainingText("conversations" if is_chat else "text", training, held_out)


def documents(path: Path, tokenizer: PreTrainedTokenizerFast, context: int, max_tokens: int) -> list[Example]:
    """Cut each document into windows. A window starts with the last token of the document's previous window."""
    parts = encoded(documents_of(path), tokenizer, max_tokens + MAX_HELD_OUT)
    tokens = np.concatenate(list(parts)).astype(np.int64)
    starts = np.flatnonzero(tokens == tokenizer.eos_token_id)
    windows = (
        (start, document[start : start + context + 1])
        for document in np.split(tokens, starts)
        for start in range(0, len(document) - 1, context)
    )
    return [Example(window, np.ones(len(window), dtype=bool), is_continued=start > 0) for start, window in windows]


def document_numbers(examples: Sequence[Example]) -> list[int]:
    """Return the number of each example's document or conversation, from 0."""
    numbers = np.cumsum([not each.is_continued for each in examples])
    found: list[int] = (numbers - numbers[0]).tolist()
    return found


def split(examples: Sequence[Example], path: Path) -> tuple[list[Example], list[Example]]:
    """Split into training and held-out examples, at least one each."""
    ends = np.cumsum([len(each) for each in examples])
    num_tokens = int(ends[-1]) if len(ends) else 0
    num_held_out = min(MAX_HELD_OUT, int(HELD_OUT_SHARE * num_tokens))
    num_training = min(int(np.searchsorted(ends, num_tokens - num_held_out)) + 1, len(examples) - 1)
    if num_training < 1:
        raise DataError(f"{path}: {num_tokens} tokens of text are too few")
    return list(examples[:num_training]), list(examples[num_training:])


class SelfTalk:
    """Generates conversations. Raises `DataError` if the tokenizer has no chat template."""

    def __init__(self, model: Nvium, tokenizer: PreTrainedTokenizerFast) -> None:
        if not tokenizer.chat_template:
            raise DataError("a model without a chat template cannot generate conversations; pass --data")
        self._tokenizer = tokenizer
        self._engine = Engine(model, EngineConfig(max_sequences=MAX_SEQUENCES))
        self._stop_token_ids, _ = ChatTemplate(tokenizer).ends()
        rendered = tokenizer.apply_chat_template([user(MARK)], add_generation_prompt=True, tokenize=False)
        before, after = str(rendered).split(MARK)
        self._before, self._after = (tokenizer.encode(text, add_special_tokens=False) for text in (before, after))
        self._room = self._engine.context - len(self._before) - len(self._after)

    def round(self, seeds: range) -> Iterator[tuple[int, Conversation, int]]:
        """Generate a conversation per seed. Yield the seed, messages and number of tokens of complete conversations."""
        drafts = self._generate(dict.fromkeys(seeds, self._before), min(MAX_REQUEST_TOKENS, self._room // 2))
        requests = {seed: draft.token_ids[:-1] for seed, draft in drafts.items() if draft.finish_reason == "stop"}
        prompts = {seed: self._before + request + self._after for seed, request in requests.items()}
        answers = self._generate(prompts, min(MAX_ANSWER_TOKENS, self._room // 2))
        for seed, completion in answers.items():
            request, answer = self._text(requests[seed]), self._text(completion.token_ids)
            if request and answer:
                yield seed, [user(request), assistant(answer)], len(requests[seed]) + len(completion.token_ids)

    def _generate(self, prompts: dict[int, list[int]], max_tokens: int) -> dict[int, Completion]:
        """Complete each prompt with its key as the seed. Raise the error of a sequence that fails."""
        completions = {seed: Completion() for seed in prompts}
        for seed, prompt in prompts.items():
            params = SamplingParams(max_tokens=max_tokens, seed=seed, stop_token_ids=self._stop_token_ids)
            self._engine.add(str(seed), prompt, params)
        for event in self._engine.run():
            completions[int(event.request_id)].append(event)
        return completions

    def _text(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True)).strip()


def write_self_talk(start: Callable[[], SelfTalk], file: Path, num_tokens: int, report: Callable[[int], None]) -> None:
    """Generate conversations until the file has `num_tokens` tokens. Save and report after every round."""
    lines = file.read_text(encoding="utf-8").split("\n")[:-1] if file.exists() else []
    written = [json.loads(line) for line in lines]
    seed, num_written = (written[-1]["seed"] + 1 if written else 0), sum(each["tokens"] for each in written)
    talk = start() if num_written < num_tokens else None
    while talk and num_written < num_tokens:
        num_conversations = min(MAX_ROUND, max(MAX_SEQUENCES, (num_tokens - num_written) // USUAL_TOKENS))
        seeds = range(seed, seed + num_conversations)
        seed, num_before = seeds.stop, num_written
        for each, messages, count in talk.round(seeds):
            if num_written < num_tokens:
                lines.append(json.dumps({"messages": messages, "seed": each, "tokens": count}, ensure_ascii=False))
                num_written += count
        if num_written == num_before:
            raise DataError(f"the model completed none of {num_conversations} generated conversations; pass --data")
        partial = file.with_name(f"partial-{file.name}")
        partial.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        partial.replace(file)
        report(num_written)
