"""Which dense model costs as much as an N-vium: in training (isoFLOP), and per generated token (isoSpeed)."""

from collections.abc import Mapping, Sequence
from functools import partial
from statistics import median

import numpy as np
from torch import nn

from nvium_core.bench.harness import Figures, subject_of
from nvium_core.engine.params import SamplingParams
from nvium_core.evaluation.latency import OURS, generators, milliseconds, warm_engine
from nvium_core.evaluation.predictions import EvaluationError
from nvium_core.evaluation.report import table
from nvium_core.evaluation.turns import MAX_NEW_TOKENS, Questions, take_turns
from nvium_core.loading import LoadedModel
from nvium_core.model.config import NviumConfig
from nvium_core.model.flops import flops_per_token
from nvium_core.model.nvium import NviumForCausalLM
from nvium_core.training.baselines.univium import univium_config

PROMPT = "prompt"


def iso_flop_tokens(flops: float, dense_flops: float, num_tokens: float) -> float:
    """Training tokens that cost a dense model what `num_tokens` cost ours: D_dense = F / F_dense · D. Steps of equal
    size work as well as tokens."""
    return flops / dense_flops * num_tokens


def iso_speed_layers(dense_milliseconds: Mapping[int, float], milliseconds: float) -> float:
    """The depth, in layers, at which a dense model takes `milliseconds` a token, from times at other depths.

    By a straight line through the measured points, since each layer adds the same time.
    """
    if len(dense_milliseconds) < 2:
        raise EvaluationError("the dense depth of equal speed needs times measured at two depths or more")
    per_layer, fixed = np.polyfit(list(dense_milliseconds), list(dense_milliseconds.values()), 1)
    return float((milliseconds - fixed) / per_layer)


def evaluate_iso(
    loaded: LoadedModel, depths: Sequence[int], num_tokens: float, trials: int, show_progress: bool = True
) -> Figures:
    """A model beside dense ones of its width and several depths, with random weights: they cost the same.

    `num_tokens` are those ours was trained on, or 1 for ratios. All take turns at the same prompt.
    """
    if len(set(depths)) < 2 or min(depths) < 1:
        raise EvaluationError("--depths: needs two or more numbers of layers")
    config, models = loaded.model.config, {depth: dense_model(loaded, depth) for depth in depths}
    times = measured_times(loaded, models, trials, show_progress)
    flops = flops_of(config)
    rows = [
        {
            "layers": depth,
            "milliseconds": times[str(depth)],
            "flops": flops_of(model.model.config),
            "tokens": iso_flop_tokens(flops, flops_of(model.model.config), num_tokens),
        }
        for depth, model in models.items()
    ]
    return {
        **subject_of(loaded).as_dict(),
        "layers": config.num_hidden_layers,
        "milliseconds": times[OURS],
        "flops": flops,
        "tokens": num_tokens,
        "dense": rows,
        "iso_speed_layers": iso_speed_layers({depth: times[str(depth)] for depth in depths}, times[OURS]),
    }


def dense_model(loaded: LoadedModel, depth: int) -> LoadedModel:
    """A Llama of the model's width and this depth, with weights rounded to bfloat16, as a saved model's are."""
    config = univium_config(loaded.model.config)
    config.num_hidden_layers, config.exit_layers = depth, [depth]
    dense = nn.Module.to(NviumForCausalLM(config).bfloat16(), loaded.model.device, loaded.model.dtype).eval()
    return LoadedModel(f"{depth} layers", dense, loaded.tokenizer)


def flops_of(config: NviumConfig) -> float:
    """Of a token in a forward pass of training, over the whole context."""
    return float(flops_per_token(config, config.max_position_embeddings).total)


def measured_times(
    loaded: LoadedModel, models: Mapping[int, LoadedModel], trials: int, show_progress: bool
) -> dict[str, float]:
    """Milliseconds per token, medians over trials: ours, and by number of layers."""
    running = {OURS: warm_engine(loaded, "sweep")}
    running |= {str(depth): warm_engine(model, "sweep") for depth, model in models.items()}
    prompt = subject_of(loaded).prompt
    num_tokens = min(MAX_NEW_TOKENS, running[OURS].context - len(prompt))
    asked = Questions(prompts={PROMPT: [prompt]}, max_new_tokens=num_tokens, prompts_cut=0)
    params = partial(SamplingParams, max_tokens=num_tokens, ignore_eos=True)
    answers = take_turns(generators(running, params), asked, trials, show_progress)
    return {name: median(milliseconds(of[PROMPT])) for name, of in answers.items()}


def markdown(figures: Figures) -> str:
    """The table of depths, and the depth of equal speed."""
    columns = ["model", "layers", "ms a token", "MFLOPs a token", "tokens of equal FLOPs"]
    rows = [[name, of["layers"], of["milliseconds"], of["flops"] / 1e6, of["tokens"]] for name, of in named(figures)]
    return (
        f"{table(columns, rows)}\n\nA dense model of {figures['iso_speed_layers']:.1f} layers takes as long per token."
    )


def named(figures: Figures) -> list[tuple[str, Figures]]:
    return [(figures["model"], figures), *(("dense", row) for row in figures["dense"])]
