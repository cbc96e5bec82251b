"""Small random base models with byte tokenizers, and a text."""

from pathlib import Path
from shutil import copytree

import pytest

from nvium_core.training.optimizer import LearningRate
from nvium_core.training.retrofitting import run as module
from tests.byte_model import END_OF_TEXT, TURNS, wrapped_tokenizer
from tests.model.gguf_files import write_gguf
from tests.model.llama_folders import llama_folder, random_llama
from tests.model.test_backbones import GEMMA, random_model
from tests.text.test_gguf_tokenizer import VOCABULARIES

DOCUMENTS = [f"There were {n} foxes, and {n + 1} hens. " * 6 for n in range(60)]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = {"vocab_size": 257, "num_hidden_layers": 4, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
    folder = llama_folder(
        tmp_path_factory.mktemp("llama"), random_llama(**shape, max_position_embeddings=256).bfloat16()
    )
    wrapped_tokenizer().save_pretrained(folder)
    (folder / "README.md").write_text("---\nlicense: mit\n---\n", encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def chatty(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chatty")
    copytree(llama, folder, dirs_exist_ok=True)
    wrapped_tokenizer(TURNS).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 with QK-norm, wide heads and a tied head."""
    folder = tmp_path_factory.mktemp("qwen3")
    shape = {"vocab_size": 257, "head_dim": 16, "tie_word_embeddings": True, "max_position_embeddings": 256}
    random_model("qwen3", shape | {"bos_token_id": 0, "eos_token_id": 0}).bfloat16().save_pretrained(folder)
    wrapped_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Gemma 3 quantized to Q8_0, with a tokenizer."""
    fields = VOCABULARIES["smollm"]
    shape = {"vocab_size": len(fields["tokenizer.ggml.tokens"]), "hidden_size": 64, "intermediate_size": 64}
    own = {"attention.sliding_window": 6}
    model = random_model("gemma3_text", GEMMA | shape | {"head_dim": 32, "max_position_embeddings": 256})
    return write_gguf(tmp_path_factory.mktemp("gguf") / "gemma3.gguf", model, "Q8_0", tokenizer=fields, own=own)


@pytest.fixture
def few_tokens_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make steps small, and the learning rate high enough for a narrow model to learn in a few steps."""
    monkeypatch.setattr(module, "TOKENS_PER_STEP", 512)
    monkeypatch.setattr(module, "RATE", LearningRate(maximum=1e-3))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text(f"\n{END_OF_TEXT}\n".join(DOCUMENTS), encoding="utf-8")
    return file
