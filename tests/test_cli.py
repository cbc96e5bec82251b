import io
import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest


def test_without_arguments_it_prints_the_help(nvium):
    assert "\nCommands:\n" in nvium().out
    assert nvium("--version").out.startswith("nvium ")


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="the system does not list descriptors")
def test_closed_standard_streams_are_opened_on_dev_null():
    report = "print({number: os.readlink(f'/proc/self/fd/{number}') for number in range(3)}, file=open(4, 'w'))"
    code = f"import os; from nvium_core import cli; cli.fail = lambda message: {report}; cli.main()"
    shell = 'exec 4>&1; exec "$0" -c "$1" nonsense <&- >&- 2>&-'
    ended = subprocess.run(["sh", "-c", shell, sys.executable, code], capture_output=True, text=True, check=False)
    assert ended.stdout.strip() == str(dict.fromkeys(range(3), "/dev/null"))


def test_a_prompt_is_continued_the_same_way_for_the_same_seed(nvium, model_folder):
    arguments = ("generate", model_folder, "--prompt", "Once", "--max-tokens", 12, "--seed", 3)
    first, remarks = nvium(*arguments)
    assert first.startswith("Once")
    assert first == nvium(*arguments).out
    assert "mean depth" in remarks


def test_each_line_of_standard_input_is_answered_in_a_chat(nvium, monkeypatch, model_folder):
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\nAgain\n"))
    assert nvium("chat", model_folder, "--max-tokens", 4, "--system", "Be brief.").err.count("tokens/s") == 2


def test_a_port_in_use_is_one_line_and_exit_code_2(nvium, model_folder):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        complaint = f"cannot listen on 127.0.0.1:{port}: Address already in use; choose another --port\n"
        assert complaint in nvium.refuses("serve", model_folder, "--port", port)


def test_a_model_is_evaluated_to_a_table_and_a_file(nvium, model_folder, tmp_path):
    text, figures = tmp_path / "text.txt", tmp_path / "figures.json"
    text.write_text("One fox.\n<|endoftext|>\nTwo foxes.\n", encoding="utf-8")
    shown = nvium("evaluate", model_folder, "--data", text, "--json", figures).out
    written = json.loads(figures.read_text())
    assert shown.startswith(f"{written['model']}: perplexity {written['perplexity']:.4g}; mean depth")
    assert "bits per character" in " ".join(shown.split())
    assert max(map(len, shown.splitlines())) <= 80
    assert "…" not in shown
    assert {"command", "processor", "commit"} < written.keys()
    assert written["num_characters"] == len("One fox.") + len("Two foxes.")
    assert (written["text"]["file"], written["text"]["num_documents"]) == ("text.txt", 2)
    assert sum(written["exit_shares"]) == pytest.approx(1)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--frobnicate"], "--frobnicate"),
        (["frobnicate"], "frobnicate"),
        (["generate", "no-such-folder"], "no-such-folder"),
        (["generate", "--max-tokens", "many"], "--max-tokens"),
        (["generate", "MODEL", "--max-tokens", "100000"], "max_tokens"),
        (["generate", "MODEL", "--prompt", "\udcff"], "prompt: must be valid UTF-8 text\n"),
        (["generate", "MODEL", "--exits", "missing"], "exits: missing: no such folder, file or Hub name\n"),
        (["generate", "MODEL", "more"], "unexpected argument 'more'\n"),
        (["evaluate", "MODEL"], "--data"),
        (["evaluate", "MODEL", "--data", "no-such-file"], "no-such-file"),
        (["evaluate", "MODEL", "--data", "x.jsonl"], "x.jsonl: must be text, not .jsonl"),
        (["evaluate", "MODEL", "--data", "x", "--json", "no-such-folder/x.json"], "no-such-folder"),
        (["train", "tiny", "--data", "x", "--set", "frob=1"], "frob"),
        (["train", "tiny"], "--data"),
        (["serve", "no-such-folder", "--port", "0"], "no-such-folder"),
        (["serve", "MODEL", "--port", "99999"], "port: must be less than"),
        (["serve", "MODEL", "--port", "abc"], "'--port': must be an integer\n"),
        (["serve", "MODEL", "--chat-template", "no-such-file"], "no-such-file: No such file or directory\n"),
        (["chat", "no-such-folder", "--top-p", "2"], "top_p: must be in (0, 1]"),
        (["serve", "MODEL", "--context", "1", "--port", "0"], "context"),
        (["serve", "MODEL", "--device", "tpu"], "'--device': 'tpu' is not one of 'auto', 'cpu', 'cuda'.\n"),
        (["serve", "MODEL", "--device", "cuda:1"], "must be 'cuda'; for GPU 1, set CUDA_VISIBLE_DEVICES=1 in the"),
        (["serve", "MODEL", "--cache-dtype", "int8", "--port", "0"], "'--cache-dtype': 'int8' is not one of 'auto',"),
        (["generate", "MODEL", "--dtype", "float64", "--cache-dtype", "float16"], "cache_dtype: must be auto"),
    ],
)
def test_a_user_error_is_one_line_and_exit_code_2(nvium, monkeypatch, model_folder, tmp_path, arguments, complaint):
    monkeypatch.chdir(tmp_path)
    assert complaint in nvium.refuses(*(str(model_folder) if a == "MODEL" else a for a in arguments))


def test_neither_help_nor_errors_reveal_a_key(nvium, monkeypatch):
    monkeypatch.setenv("NVIUM_API_KEYS", "sk-never-told,sk-never-told")
    told = nvium("serve", "--help").out
    assert "--api-keys" in told
    told += nvium.refuses("serve", "no-such-folder")
    told += nvium.refuses("serve", "--port", "99999")
    told += nvium.refuses("serve", "--api-keys", "sk-never-told told", "--port", "0")
    assert "never-told" not in told


def test_recipes_are_listed_by_name(nvium, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    listed = nvium("recipes").out
    assert all(f" {name} " in listed for name in ("tales", "small", "paper-24x768"))
    assert "…" not in listed and len(listed.splitlines()) <= 25


def test_running_out_of_memory_is_one_line(nvium, monkeypatch, model_folder):
    def exhausted(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr("nvium_core.llm.load_model", exhausted)
    assert "not enough memory" in nvium.refuses("generate", model_folder)
