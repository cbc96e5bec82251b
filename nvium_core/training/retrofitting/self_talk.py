"""Conversations that a chat model has with itself: its chat template leads it up to the user's turn, which it samples,
and then the answer (Magpie, 2406.08464). So exits learn from text such as the model will write.

Sampled at temperature 1 from seeds that count up, so the n-th conversation is always the same, and so is a file of
a given size. The file is rewritten after every round.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from nvium_core.engine.engine import Engine
from nvium_core.engine.events import Completion, FailureEvent, TokenEvent
from nvium_core.engine.params import EngineConfig, SamplingParams
from nvium_core.model.nvium import Nvium
from nvium_core.text.chat_template import ChatTemplate
from nvium_core.training.chat.conversations import Conversation, assistant, user
from nvium_core.training.data.documents import DataError

SEATS, MAX_ROUND = 64, 256
"""Sequences that run at once; conversations begun together, no more than are probably missing, are between the two."""

USUAL_TOKENS = 150
"""Usual length of a conversation."""

MAX_REQUEST_TOKENS, MAX_ANSWER_TOKENS = 128, 256
"""A request that is longer has gone astray; an answer is cut."""

MARK = "a text that no template has"


class SelfTalk:
    """Raises `DataError` for a tokenizer without a chat template."""

    def __init__(
        self,
        model: Nvium,
        tokenizer: PreTrainedTokenizerFast,
    ) -> None:
        if not tokenizer.chat_template:
            raise DataError("a model without a chat template cannot talk to itself; give a text to learn from")
        self._tokenizer = tokenizer
        self._engine = Engine(model, EngineConfig(max_sequences=SEATS))
        self._ends = ChatTemplate(tokenizer).stop_token_ids
        rendered = tokenizer.apply_chat_template([user(MARK)], add_generation_prompt=True, tokenize=False)
        before, after = str(rendered).split(MARK)
        self._before, self._after = (tokenizer.encode(text, add_special_tokens=False) for text in (before, after))
        self._room = self._engine.context - len(self._before) - len(self._after)

    def round(self, seeds: range) -> Iterator[tuple[int, Conversation, int]]:
        """Generate conversations for these seeds; yields the complete ones with their seeds and lengths."""
        begun = self._said(dict.fromkeys(seeds, self._before), min(MAX_REQUEST_TOKENS, self._room // 2))
        requests = {seed: said.token_ids[:-1] for seed, said in begun.items() if said.finish_reason == "stop"}
        prompts = {seed: self._before + request + self._after for seed, request in requests.items()}
        answers = self._said(prompts, min(MAX_ANSWER_TOKENS, self._room // 2))
        for seed, said in answers.items():
            request, answer = self._text(requests[seed]), self._text(said.token_ids)
            if request and answer:
                yield seed, [user(request), assistant(answer)], len(requests[seed]) + len(said.token_ids)

    def _said(self, prompts: dict[int, list[int]], max_tokens: int) -> dict[int, Completion]:
        """Completions by seed. Raises the error of a sequence that failed."""
        said = {seed: Completion() for seed in prompts}
        for seed, prompt in prompts.items():
            asked = SamplingParams(max_tokens=max_tokens, seed=seed, stop_token_ids=self._ends)
            self._engine.add(str(seed), prompt, asked)
        while self._engine.has_work:
            for event in self._engine.step():
                if isinstance(event, FailureEvent):
                    raise event.error
                if isinstance(event, TokenEvent):
                    said[int(event.sequence_id)].append(event)
        return said

    def _text(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True)).strip()


def write_self_talk(begin: Callable[[], SelfTalk], file: Path, num_tokens: int, tell: Callable[[int], None]) -> None:
    """Write until the file has `num_tokens` tokens of requests and answers; a shorter file is continued. `tell` gets
    the number of tokens after every round."""
    lines = file.read_text(encoding="utf-8").split("\n")[:-1] if file.exists() else []
    written = [json.loads(line) for line in lines]
    seed, num_written = (written[-1]["seed"] + 1 if written else 0), sum(each["tokens"] for each in written)
    talk = begin() if num_written < num_tokens else None
    while talk and num_written < num_tokens:
        seeds = range(seed, seed + conversations_for(num_tokens - num_written))
        seed, num_before = seeds.stop, num_written
        for each, said, count in talk.round(seeds):
            if num_written < num_tokens:
                lines.append(json.dumps({"messages": said, "seed": each, "tokens": count}, ensure_ascii=False))
                num_written += count
        if num_written == num_before:
            raise DataError(f"none of {len(seeds)} requests that the model made up ended; give a text to learn from")
        scratch = file.with_name(f"partial-{file.name}")
        scratch.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        scratch.replace(file)
        tell(num_written)


def conversations_for(num_tokens: int) -> int:
    """How many to begin."""
    return min(MAX_ROUND, max(SEATS, num_tokens // USUAL_TOKENS))
