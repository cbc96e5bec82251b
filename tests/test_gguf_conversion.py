from pathlib import Path

import pytest
import torch

from nvium_core import LLM, load_model
from tests.model.gguf_files import write_gguf
from tests.model.test_backbones import random_model
from tests.public_model import needs_smollm, smollm
from tests.server.server_process import server_process
from tests.text.test_gguf_tokenizer import END, VOCABULARIES

TEXT = f"The quick brown fox{END}\n  1234567 über"
FIELDS = VOCABULARIES["smollm"]
SHAPE = {"vocab_size": len(FIELDS["tokenizer.ggml.tokens"]), "num_hidden_layers": 2, "max_position_embeddings": 64}
SMALL = SHAPE | {"hidden_size": 64, "intermediate_size": 64}


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
@torch.no_grad()
def test_a_converted_file_is_the_same_model_and_tokenizer(nvium, kind, tmp_path):
    file = write_gguf(tmp_path / "model.gguf", random_model("llama", SMALL), kind, tokenizer=FIELDS)
    nvium("convert", file, tmp_path / "folder", "--dtype", "float32")
    original, converted = (load_model(str(place), dtype="float32") for place in (file, tmp_path / "folder"))
    assert converted.name == "folder"
    ids = original.tokenizer(TEXT).input_ids
    assert converted.tokenizer(TEXT).input_ids == ids
    assert converted.tokenizer.chat_template == original.tokenizer.chat_template
    assert converted.model.config.eos_token_id == original.model.config.eos_token_id
    given = torch.tensor([ids])
    assert torch.equal(converted.model(given).logits, original.model(given).logits)


def test_a_file_of_200_mb_is_served_from_its_own_blocks(tmp_path):
    """The process takes the memory of the packed blocks, and has no second copy of them."""
    fields = {"vocab_size": 131_072, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 16}
    with torch.device("meta"):
        model = random_model("llama", SHAPE | fields | {"tie_word_embeddings": True})
    file = write_gguf(tmp_path / "large.gguf", model, "Q4_K", tokenizer=FIELDS)
    assert file.stat().st_size > 200e6
    with server_process(file, tmp_path, max_sequences=1, device="cpu") as server:
        answer = server.http.post("/v1/completions", json={"model": "large", "prompt": "The", "seed": 1}).json()
        [card] = server.http.get("/v1/models").json()["data"]
        peak = Path(f"/proc/{server.process.pid}/status").read_text().split("VmHWM:")[1].split()[0]
    assert answer["usage"]["completion_tokens"] > 0
    assert (card["nvium"]["weights"], card["nvium"]["arithmetic"]) == ("Q4_K", "float32")
    assert int(peak) * 1024 < 1.2 * file.stat().st_size + 0.7e9


def test_float32_means_what_auto_means_for_quantized_files(tmp_path):
    file = write_gguf(tmp_path / "model.gguf", random_model("llama", SMALL), "Q4_1", tokenizer=FIELDS)
    auto, named = (load_model(str(file), "cpu", dtype) for dtype in ("auto", "float32"))
    assert auto.precision() == named.precision()
    for one, other in zip(auto.model.parameters(), named.model.parameters(), strict=True):
        assert type(one) is type(other) and torch.equal(one + 0, other + 0)


@needs_smollm
@pytest.mark.slow
def test_a_public_model_knows_a_capital():
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    [answer] = LLM(str(smollm())).chat(messages, temperature=0, max_tokens=8)
    assert "Paris" in answer.text
