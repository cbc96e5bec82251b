"""The published layout in other shapes than the authors' fixture, against a slow reference implementation.

The reference shares no code with our model: its hidden states come from transformers' LlamaModel, whose norms round to
float32, hence the tolerance.
Shapes: B sequences, T tokens, D width, V vocabulary.
"""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaModel

from nvium_core import CheckpointError, NviumForCausalLM
from tests.random_models import random_model

EXIT_LAYERS = [1, 4, 5]
ROUTER_TEMPERATURE = 1.7


def published_name(ours: str, last: int) -> str:
    """Return the authors' name of our tensor, as in the fixture."""
    if not ours.startswith("exits."):
        return ours
    _, exit_, rest = ours.split(".", 2)
    if int(exit_) == last:
        final = {"norm.weight": "model.norm.weight", "adapter.up.weight": "final_adapter.0.weight"}
        return final.get(rest, "final_adapter.2.weight")
    early = {
        "norm.weight": f"early_norms.{exit_}.weight",
        "adapter.up.weight": f"early_adapters.{exit_}.0.weight",
        "adapter.down.weight": f"early_adapters.{exit_}.2.weight",
        "router.norm.weight": f"router_final_norms.{exit_}.weight",
    }
    router = re.sub(r"^router\.head\.", f"router_heads.{exit_}.", rest)
    return early.get(rest, re.sub(r"^router\.(fc\d)\.", rf"router_layers.{exit_}.layers.0.\1.", router))


def write_published(folder: Path, model: NviumForCausalLM) -> None:
    config, last = model.config, model.config.num_exits - 1
    tensors = {published_name(name, last): tensor.contiguous() for name, tensor in model.state_dict().items()}
    extras = {
        "early_layer_idx": EXIT_LAYERS[:-1],
        "router": {"intermediate_size": config.router_hidden_size, "router_temp": ROUTER_TEMPERATURE},
        "early_adapter": {"enabled": True, "dim": config.adapter_hidden_size},
        "tying": {"tie_early_to_final": True},
    }
    copied = ("vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings")
    copied += ("num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    llama_fields = LlamaConfig(**{name: getattr(config, name) for name in copied}).to_dict()
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra" / "config.yaml").write_text(yaml.safe_dump(extras), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(llama_fields | {"architectures": ["NviumModel"]}), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("published") / "model"
    write_published(folder, random_model(EXIT_LAYERS, seed=3))
    return folder


def slow_mixture(folder: Path, input_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Compute π_mix [B, T, V] and p_k [B, T, E] in probability space, exit by exit, in float64."""
    tensors = load_file(folder / "model.safetensors")
    config = LlamaConfig.from_pretrained(folder)
    backbone = LlamaModel(config).double().eval()
    own = {name.removeprefix("model."): t for name, t in tensors.items() if name.startswith("model.")}
    backbone.load_state_dict(own)
    with torch.no_grad():
        hidden = backbone(input_ids, output_hidden_states=True)

    def rms_norm(x_BTD: Tensor, weight: str) -> Tensor:
        return x_BTD / (x_BTD.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps).sqrt() * tensors[weight]

    def exit_probability(x_BTD: Tensor, k: int) -> Tensor:
        names = [f"router_layers.{k}.layers.0.{fc}" for fc in ("fc1", "fc2")]
        inner = torch.nn.functional.gelu(x_BTD @ tensors[f"{names[0]}.weight"].T + tensors[f"{names[0]}.bias"])
        outer = inner @ tensors[f"{names[1]}.weight"].T + tensors[f"{names[1]}.bias"]
        weight, bias = tensors[f"router_heads.{k}.weight"], tensors[f"router_heads.{k}.bias"]
        logits = rms_norm(outer, f"router_final_norms.{k}.weight") @ weight.T + bias
        odds = (logits / ROUTER_TEMPERATURE).exp()
        return odds[..., 1] / odds.sum(-1)

    def head(x_BTD: Tensor, adapter: str) -> Tensor:
        inner = x_BTD @ tensors[f"{adapter}.0.weight"].T
        adapted = x_BTD + (inner * inner.sigmoid()) @ tensors[f"{adapter}.2.weight"].T
        odds = (adapted @ tensors["lm_head.weight"].T).exp()
        return odds / odds.sum(-1, keepdim=True)

    reached = torch.ones(input_ids.shape, dtype=torch.float64)
    mixture, probabilities = torch.zeros(()), []
    for k, depth in enumerate(EXIT_LAYERS[:-1]):
        x_BTD = rms_norm(hidden.hidden_states[depth], f"early_norms.{k}.weight")
        w = exit_probability(x_BTD, k)
        probabilities.append(reached * w)
        mixture = mixture + probabilities[-1][..., None] * head(x_BTD, f"early_adapters.{k}")
        reached = reached * (1 - w)
    mixture = mixture + reached[..., None] * head(hidden.last_hidden_state, "final_adapter")
    return mixture, torch.stack([*probabilities, reached], -1)


def test_a_published_folder_equals_the_reference(folder):
    input_ids = torch.randint(17, (2, 24), generator=torch.Generator().manual_seed(0))
    model = NviumForCausalLM.from_pretrained(folder)
    assert model.config.exit_layers == EXIT_LAYERS and model.dtype == torch.float64
    with torch.no_grad():
        output = model(input_ids)
    mixture, probabilities = slow_mixture(folder, input_ids)
    torch.testing.assert_close(output.logits.exp(), mixture, rtol=0, atol=1e-5)
    torch.testing.assert_close(output.exit_probs, probabilities, rtol=0, atol=1e-5)


def test_separate_heads_are_rejected(folder, tmp_path):
    file = shutil.copytree(folder, tmp_path / "model") / ".hydra" / "config.yaml"
    extras = yaml.safe_load(file.read_text(encoding="utf-8")) | {"tying": {"tie_early_to_final": False}}
    file.write_text(yaml.safe_dump(extras), encoding="utf-8")
    with pytest.raises(CheckpointError, match="tie_early_to_final"):
        NviumForCausalLM.from_pretrained(tmp_path / "model")
