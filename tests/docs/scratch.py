"""A folder with what the pages' commands are told to read: small models, a few tales, questions, keys, evaluations.

No command needs what another has written, so they run in any order.
"""

import gzip
import json
import lzma
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard
from transformers import PreTrainedModel

from nvium_core.training.data.documents import END_OF_TEXT
from tests.byte_model import load_byte_model
from tests.docs.pages import ROOT
from tests.planning.test_forecast import report as load_report
from tests.training.baselines.small_models import small_calm, small_univium

NVIUMS = ("MODEL", "runs/small/model", "runs/tales/model", "runs/tiny/model")
DENSES = ("DENSE", "runs/small-dense/model", "runs/tales-dense/model")
TEXTS = ("valid.txt.xz", "train.txt.xz", "data/tales/tales.txt.xz", "stories.txt", "c4.txt.xz")
TALES = (
    "The Fox\n\nOne fox met a crow.\n<|endoftext|>\nThe Crow\n\nTwo crows met a fox, and both of them spoke"
    + " of the other" * 20
    + ".\n"
)
EVALUATIONS = {
    "others.json": "evaluation-small-beta-0.json",
    "evaluation.json": "evaluation-small.json",
    "small.json": "evaluation-small.json",
    "calm.json": "evaluation-small-calm.json",
    "layerskip.json": "evaluation-small-layerskip.json",
}


def furnish(folder: Path) -> None:
    loaded = load_byte_model(context=320)
    models: dict[str, PreTrainedModel] = dict.fromkeys(NVIUMS, loaded.model)
    models |= dict.fromkeys(DENSES, small_univium(vocab_size=257))
    models["runs/small-calm/model"] = small_calm(vocab_size=257)
    for name, model in models.items():
        model.save_pretrained(folder / name)
        loaded.tokenizer.save_pretrained(folder / name)
    (folder / "data" / "tales").mkdir(parents=True)
    for name in TEXTS:
        content = TALES.encode()
        (folder / name).write_bytes(lzma.compress(content) if name.endswith(".xz") else content)
    furnish_corpus(folder / "c4")
    question = {"category": "qa", "turns": ["Who met the crow?"]}
    (folder / "question.jsonl").write_text(json.dumps(question) + "\n")
    (folder / "keys.txt").write_text("alice: a-long-secret-key\n")
    for name, source in EVALUATIONS.items():
        shutil.copy(ROOT / "benchmarks" / source, folder / name)
    (folder / "served.json").write_text(json.dumps(load_report(5.0)).replace("[1, 2, 3, 3]", "[1, 2, 3, 4]"))
    shutil.copy(ROOT / "benchmarks" / "costs-tales-6m.json", folder / "costs.json")
    (folder / "docs" / "figures").mkdir(parents=True)


def furnish_corpus(folder: Path) -> None:
    """A file of each kind."""
    folder.mkdir()
    documents = TALES.split(f"\n{END_OF_TEXT}\n") * 20
    lines = "".join(json.dumps({"text": document, "url": "https://example.org"}) + "\n" for document in documents)
    (folder / "c4-train.00000-of-00002.json.gz").write_bytes(gzip.compress(lines.encode()))
    (folder / "c4-train.00001-of-00002.json.zst").write_bytes(zstandard.compress(lines.encode()))
    (folder / "more.jsonl").write_text(lines)
    (folder / "more.txt.xz").write_bytes(lzma.compress(TALES.encode()))
    pq.write_table(pa.table({"text": documents}), folder / "more.parquet")
