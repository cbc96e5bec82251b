import pytest
import torch

from nvium_core import LLM, load_model
from tests.model.gguf_files import write_gguf
from tests.model.test_backbones import random_model
from tests.public_model import needs_smollm, smollm
from tests.server.live_server import live_server
from tests.text.test_gguf_tokenizer import END, VOCABULARIES

TEXT = f"The quick brown fox{END}\n  1234567 über"
FIELDS = VOCABULARIES["smollm"]
SHAPE = {"vocab_size": len(FIELDS["tokenizer.ggml.tokens"]), "num_hidden_layers": 2, "max_position_embeddings": 64}


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
@torch.no_grad()
def test_a_converted_file_is_the_same_model_and_tokenizer(nvium, kind, tmp_path):
    shape = SHAPE | {"hidden_size": 64, "intermediate_size": 64}
    file = write_gguf(tmp_path / "model.gguf", random_model("llama", shape), kind, tokenizer=FIELDS)
    nvium("convert", file, tmp_path / "folder", "--dtype", "float32")
    original, converted = (load_model(str(place), dtype="float32") for place in (file, tmp_path / "folder"))
    assert converted.name == "folder"
    ids = original.tokenizer(TEXT).input_ids
    assert converted.tokenizer(TEXT).input_ids == ids
    assert converted.tokenizer.chat_template == original.tokenizer.chat_template
    assert converted.model.config.eos_token_id == original.model.config.eos_token_id
    given = torch.tensor([ids])
    assert torch.equal(converted.model(given).logits, original.model(given).logits)


def test_a_file_is_served(tmp_path):
    model = load_model(str(write_gguf(tmp_path / "tiny.gguf", random_model("llama", SHAPE), tokenizer=FIELDS)))
    with live_server(model) as server:
        answer = server.http.post("/v1/completions", json={"model": "tiny", "prompt": "The", "seed": 1})
    assert answer.json()["usage"]["completion_tokens"] > 0


@needs_smollm
@pytest.mark.slow
def test_a_public_model_knows_a_capital():
    [answer] = LLM(str(smollm())).chat(
        [{"role": "user", "content": "What is the capital of France?"}], temperature=0, max_tokens=8
    )
    assert "Paris" in answer.text
