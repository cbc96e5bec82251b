import json
import subprocess
import sys

from tests.training.small_runs import small_corpus

OF_THE_SERVER = ("fastapi", "starlette", "uvicorn", "pydantic_settings", "prometheus_client", "structlog", "llguidance")
"""pydantic is a dependency of typer; test_architecture checks that we do not import it ourselves."""

PROGRAM = """
import sys, json

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {missing}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
from nvium_core import cli

for arguments in json.loads(sys.argv[1]):
    sys.argv = ["nvium", *arguments]
    try:
        cli.main()
    except SystemExit as end:
        if end.code:
            raise
"""


def test_train_evaluate_generate_and_bench_run_without_server_dependencies(tmp_path):
    corpus, run, figures = small_corpus(tmp_path / "corpus.txt"), tmp_path / "run", tmp_path / "figures.json"
    model = str(run / "model")
    tiny = ["--set", "total_tokens=2048", "--set", "shape.vocab_size=300"]
    commands = [
        ["train", "tiny", "--data", str(corpus), "--folder", str(run), "--no-compile", *tiny],
        ["evaluate", model, "--data", str(corpus), "--json", str(tmp_path / "evaluation.json")],
        ["generate", model, "--prompt", "the cat", "--max-tokens", "5"],
        ["bench", "profile", "--shape", "2x128", "--routing", "1,0", "--tokens", "2", "--json", str(figures)],
    ]
    program = [sys.executable, "-c", PROGRAM.format(missing=OF_THE_SERVER), json.dumps(commands)]
    done = subprocess.run(program, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    assert model in done.stdout and "host overhead" in done.stdout
    [row] = json.loads(figures.read_text())["rows"]
    assert row["parts_us"]["layers"] > 0
