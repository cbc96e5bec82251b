"""The command line, run in this process."""

import io
import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from nvium_core import cli
from tests.byte_model import save_byte_model


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_byte_model(tmp_path_factory.mktemp("models") / "byte-model")


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """Run `nvium ARGUMENTS` in this process and return its exit code."""
    monkeypatch.setattr(sys, "argv", ["nvium", *map(str, arguments)])
    with pytest.raises(SystemExit) as ending:
        cli.main()
    assert isinstance(ending.value.code, int)
    return ending.value.code


def test_without_arguments_it_prints_the_help(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch) == 0
    assert "\nCommands:\n" in capsys.readouterr().out


def test_the_version_is_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "--version") == 0
    assert capsys.readouterr().out.startswith("nvium ")


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="the system does not list descriptors")
def test_closed_standard_streams_are_opened_on_dev_null() -> None:
    report = "print({number: os.readlink(f'/proc/self/fd/{number}') for number in range(3)}, file=open(4, 'w'))"
    code = f"import os; from nvium_core import cli; cli.fail = lambda message: {report}; cli.main()"
    shell = 'exec 4>&1; exec "$0" -c "$1" nonsense <&- >&- 2>&-'
    ended = subprocess.run(["sh", "-c", shell, sys.executable, code], capture_output=True, text=True, check=False)
    assert ended.stdout.strip() == str(dict.fromkeys(range(3), "/dev/null"))


def test_a_prompt_is_continued_the_same_way_for_the_same_seed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model_folder: Path
) -> None:
    arguments = ("generate", model_folder, "--prompt", "Once", "--max-tokens", 12, "--seed", 3)
    assert run(monkeypatch, *arguments) == 0
    first, remarks = capsys.readouterr()
    assert run(monkeypatch, *arguments) == 0
    assert first.startswith("Once")
    assert first == capsys.readouterr().out
    assert "mean depth" in remarks


def test_each_line_of_standard_input_is_answered_in_a_chat(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model_folder: Path
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\nAgain\n"))
    assert run(monkeypatch, "chat", model_folder, "--max-tokens", 4, "--system", "Be brief.") == 0
    assert capsys.readouterr().err.count("tokens/s") == 2


def test_a_port_in_use_is_one_line_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model_folder: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert run(monkeypatch, "serve", model_folder, "--port", port) == 2
    assert f"127.0.0.1:{port}" in capsys.readouterr().err


def test_a_model_is_evaluated_to_a_table_and_a_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model_folder: Path, tmp_path: Path
) -> None:
    text, figures = tmp_path / "text.txt", tmp_path / "figures.json"
    text.write_text("One fox.\n<|endoftext|>\nTwo foxes.\n", encoding="utf-8")
    assert run(monkeypatch, "evaluate", model_folder, "--data", text, "--json", figures) == 0
    assert "bits per character" in capsys.readouterr().out
    written = json.loads(figures.read_text())
    assert written["num_characters"] == len("One fox.") + len("Two foxes.")
    assert (written["text"]["file"], written["text"]["num_documents"]) == ("text.txt", 2)
    assert sum(written["exit_shares"]) == pytest.approx(1)


def test_a_recipe_is_trained_and_its_model_generates(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text, folder = tmp_path / "text.txt", tmp_path / "run"
    text.write_text("\n<|endoftext|>\n".join(f"A tale\n\nThere were {n} foxes in a den." for n in range(400)))
    settings = ("--set", "total_tokens=4096", "--set", "shape.vocab_size=300", "--no-compile")
    assert run(monkeypatch, "train", "tiny", "--data", text, "--folder", folder, *settings) == 0
    assert str(folder / "model") in capsys.readouterr().out
    assert run(monkeypatch, "generate", folder / "model", "--max-tokens", 5) == 0


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--frobnicate"], "--frobnicate"),
        (["frobnicate"], "frobnicate"),
        (["generate", "no-such-folder"], "no-such-folder"),
        (["generate", "--max-tokens", "many"], "--max-tokens"),
        (["generate", "--dtype", "float8"], "--dtype"),
        (["generate", "MODEL", "--temperature", "3"], "temperature"),
        (["generate", "MODEL", "--max-tokens", "100000"], "max_tokens"),
        (["evaluate", "MODEL"], "--data"),
        (["evaluate", "MODEL", "--data", "no-such-file"], "no-such-file"),
        (["evaluate", "MODEL", "--data", "x", "--json", "no-such-folder/x.json"], "no-such-folder"),
        (["train", "frobnicate", "--data", "x"], "frobnicate"),
        (["train", "tiny", "--data", "x", "--set", "frob=1"], "frob"),
        (["train", "tiny", "--data", "x", "--flops-per-second", "1e12"], "--flops-per-second requires --dry-run"),
        (["train", "tiny", "--data", "x", "--set", "total_tokens=many"], "total_tokens"),
        (["bench", "--model", "MODEL", "--sequences", "0"], "sequences"),
        (["serve", "no-such-folder", "--port", "0"], "no-such-folder"),
        (["serve", "MODEL", "--port", "99999"], "port: must be less than"),
        (["serve", "MODEL", "--port", "abc"], "'--port': must be a valid integer\n"),
        (["serve", "MODEL", "--chat-template", "no-such-file"], "no-such-file: No such file or directory\n"),
        (["chat", "no-such-folder", "--top-p", "2"], "top_p: must be in (0, 1]"),
        (["serve", "MODEL", "--context", "1", "--port", "0"], "context"),
        (["serve", "MODEL", "--schedule", "chaotic"], "--schedule"),
        (["serve", "no-such-folder", "--api-keys", "a:b:c"], "api_keys, entry 1"),
        (["serve", "no-such-folder", "--api-keys-file", "no-such-file"], "no-such-file"),
        (["serve", "no-such-folder", "--requests-per-minute", "0"], "requests_per_minute"),
        (["serve", "no-such-folder", "--cors-origins", "example.org"], "cors_origins"),
        (["serve", "no-such-folder", "--otlp-endpoint", "nowhere"], "otlp_endpoint"),
    ],
)
def test_a_user_error_is_one_line_on_stderr_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    model_folder: Path,
    tmp_path: Path,
    arguments: list[str],
    complaint: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    code = run(monkeypatch, *(str(model_folder) if a == "MODEL" else a for a in arguments))
    captured = capsys.readouterr()
    assert code == 2
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert complaint in captured.err


def test_neither_help_nor_errors_reveal_a_key(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NVIUM_API_KEYS", "sk-never-told,sk-never-told")
    assert run(monkeypatch, "serve", "--help") == 0
    assert run(monkeypatch, "serve", "no-such-folder") == 2
    assert run(monkeypatch, "serve", "--port", "99999") == 2
    assert run(monkeypatch, "serve", "--api-keys", "sk-never-told told", "--port", "0") == 2
    captured = capsys.readouterr()
    assert "--api-keys" in captured.out
    assert captured.err.count("\n") == 3
    assert "never-told" not in captured.out + captured.err


def test_recipes_are_listed_by_name(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    assert run(monkeypatch, "recipes") == 0
    listed = capsys.readouterr().out
    assert all(f" {name} " in listed for name in ("tales", "small", "paper-24x768", "paper-beta-0.3"))


def test_a_dry_run_needs_no_text_and_trains_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    assert run(monkeypatch, "train", "paper-48x1536-dense", "--dry-run", "--flops-per-second", "4e14") == 0
    output = capsys.readouterr().out
    assert "1,485,719,040" in output and "tokens/s" in output
    assert list(tmp_path.iterdir()) == []
