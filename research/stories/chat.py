"""Evaluate a chat model: the loss on held-out answers, and whether sampled answers end.

    python -m research.stories.chat MODEL --data chats.jsonl

Shapes: T tokens of a conversation, A tokens of its answers, E exits.
"""

from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

import torch
from rich.progress import track
from torch import Tensor

from nvium_core.bench.figures import write_json
from nvium_core.engine.engine import Engine
from nvium_core.engine.events import Completion
from nvium_core.engine.params import SamplingParams
from nvium_core.evaluation.predictions import EvaluationError
from nvium_core.evaluation.suite import description
from nvium_core.loading import LoadedModel, load_model
from nvium_core.model import mixture
from nvium_core.model.nvium import Nvium
from nvium_core.training.chat.chat_data import chat_examples
from nvium_core.training.chat.examples import Example
from nvium_core.training.data.windows import packed_batch
from nvium_core.training.objective.loss import token_losses
from research.markdown import table


@dataclass(frozen=True, kw_only=True)
class ChatEvaluation:
    """Means over held-out answers, and over an answer sampled to each conversation's first question.

    `answer_loss` is the mean −log π_mix in nats of the held-out answers' tokens, including end-of-text. `exit_shares`
    and `mean_depth` (Σ p_k l_k / L) are means over the same tokens. `ended_share` is the share of sampled answers that
    end before the context is full. `sampled_tokens` is the sampled answers' mean length, `sampled_depth` their mean
    l_k / L.
    """

    num_conversations: int
    num_answer_tokens: int
    answer_loss: float
    exit_shares: list[float]
    mean_depth: float
    ended_share: float
    sampled_tokens: float
    sampled_depth: float


def held_out(loaded: LoadedModel, data: Path, count: int) -> list[Example]:
    """Select up to `count` conversations from a chat file. Raise `EvaluationError` if there is no chat template."""
    if not loaded.tokenizer.chat_template:
        raise EvaluationError(f"{loaded.name}: has no chat template, so it cannot answer")
    examples = chat_examples(data, loaded.tokenizer, loaded.model.config.max_position_embeddings)
    return examples[:: max(1, len(examples) // count)][:count]


def evaluate_chat(
    model: Nvium, examples: Sequence[Example], seed: int = 0, show_progress: bool = False
) -> ChatEvaluation:
    """Score every answer. Also sample an answer to each conversation's first question at temperature 1."""
    scores = [score(model, each) for each in track(examples, "scoring", disable=not show_progress)]
    log_p_AE, nll_A = (torch.cat(parts) for parts in zip(*scores, strict=True))
    depths = model.config.exit_layers or []
    sampled = sample_answers(model, examples, seed)
    exits = [exit_ for completion in sampled for exit_ in completion.exits]
    return ChatEvaluation(
        num_conversations=len(examples),
        num_answer_tokens=len(nll_A),
        answer_loss=float(nll_A.mean()),
        exit_shares=log_p_AE.exp().mean(0).tolist(),
        mean_depth=float(mixture.mean_depth(log_p_AE, depths).mean()),
        ended_share=fmean(completion.finish_reason == "stop" for completion in sampled),
        sampled_tokens=len(exits) / len(sampled),
        sampled_depth=fmean(depths[exit_ - 1] / depths[-1] for exit_ in exits),
    )


@torch.inference_mode()
def score(model: Nvium, example: Example) -> tuple[Tensor, Tensor]:
    """Return log p [A, E] of every exit and −log π_mix [A], for all tokens of a conversation's answers."""
    ids_BT = torch.from_numpy(example.tokens).to(model.device)[None]
    is_answer_T = torch.from_numpy(example.is_answer[1:])
    losses = token_losses(model, packed_batch(ids_BT[:, :-1], ids_BT[:, 1:], end_token=-1))
    log_p_AE, nll_AE = (x[0].double().cpu()[is_answer_T] for x in (losses.log_p, losses.exit_nll))
    return log_p_AE, mixture.mixture_nll(log_p_AE, nll_AE)


def sample_answers(model: Nvium, examples: Sequence[Example], seed: int) -> list[Completion]:
    """Sample an answer to each conversation's first question, up to its end or the end of the context."""
    engine = Engine(model)
    prompts = [each.tokens[: int(each.is_answer.argmax())].tolist() for each in examples]
    return sampled(
        engine,
        [
            (prompt, SamplingParams(max_tokens=engine.context - len(prompt), seed=seed + number))
            for number, prompt in enumerate(prompts)
        ],
    )


def sampled(engine: Engine, requests: Sequence[tuple[list[int], SamplingParams]]) -> list[Completion]:
    """Complete each prompt with its parameters. If a prompt fails, raise its error."""
    for number, (prompt, params) in enumerate(requests):
        engine.add(str(number), prompt, params)
    completions = [Completion() for _ in requests]
    for event in engine.run():
        completions[int(event.request_id)].append(event)
    return completions


def main(arguments: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(prog="python -m research.stories.chat", description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help="folder or Hub name [the bundled model]")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--conversations", type=int, default=100)
    args = parser.parse_args(arguments)
    loaded = load_model(args.model, "cpu")
    found = evaluate_chat(loaded.model, held_out(loaded, args.data, args.conversations), show_progress=True)
    figures = description(loaded) | asdict(found)
    print(table(["figure", "value"], figures.items()))
    if args.json:
        write_json(figures, args.json)


if __name__ == "__main__":
    main()
