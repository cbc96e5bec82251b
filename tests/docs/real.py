"""Commands held to what they call, without running them: whatever is renamed there is a complaint here."""

import ast
import importlib.util
import json
import re
import tomllib
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import typer
import yaml

from loadtest import options as loadtest_options
from nvium_core.cli import app
from nvium_core.training.recipes.catalogue import recipe_named
from nvium_core.training.tales.__main__ import app as tales_app
from server.settings import read_settings
from tests.docs.pages import ROOT
from tests.docs.shell import Command

COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
CHART = ROOT / "deploy" / "helm" / "nvium"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PLACEHOLDER = re.compile(r"\[?[A-Z]+(?:…|\])*|….*|.*…")
"""`MODEL`, `[MODEL]`, `FILE…`."""

NVIUM: Any = typer.main.get_command(app)
TALES: Any = typer.main.get_command(tales_app)


def check(command: Command) -> None:
    """Raises, saying what is not so, for a command that cannot mean what a page says."""
    program, *words = command.words
    checks = {
        "nvium": check_nvium,
        "torchrun": lambda words: check_nvium(words[words.index("nvium_core.cli") + 1 :]),
        "docker": check_docker,
        "helm": check_helm,
        "make": check_make,
        "pip": check_pip,
        "python": check_python,
        "serve": check_serve,
    }
    if program in checks:
        checks[program](words)


def check_nvium(words: Sequence[str]) -> None:
    """All of it, if nothing has been left out; else its name and its options."""
    if not words or words[0].startswith("--"):
        assert set(words) <= {"--version", "--help", "--install-completion", "--show-completion"}, words
        return
    values = check_command(NVIUM, words)
    if values and words[0] == "train":
        recipe_named(values["recipe"], values["settings"])
    if values and words[0] == "serve":
        read_settings({key: value for key, value in values.items() if value is not None})


def check_command(program: Any, words: Sequence[str]) -> dict[str, Any]:
    """What it is told; nothing, if something was left out."""
    name, *given = words
    command = program.commands[name]
    is_cut = any(PLACEHOLDER.fullmatch(word) for word in given) or (bool(given) and given[-1] in valued(command))
    is_whole = not is_cut and len(given) >= num_required(command)
    if not is_whole or "--help" in given:
        known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        asked = {word.partition("=")[0] for word in given if word.startswith("--")} - {"--help"}
        assert asked <= known, f"{name} has no {asked - known}"
        return {}
    values: dict[str, Any] = command.make_context(name, list(given)).params
    return values


def valued(command: Any) -> set[str]:
    """Options that want a value behind them."""
    return {
        option for parameter in command.params if not getattr(parameter, "is_flag", False) for option in parameter.opts
    }


def num_required(command: Any) -> int:
    return sum(2 if parameter.opts[0].startswith("--") else 1 for parameter in command.params if parameter.required)


def check_docker(words: Sequence[str]) -> None:
    if words[0] != "compose":
        assert (ROOT / "Dockerfile").exists()
        return
    profiles = {profile for service in COMPOSE.values() for profile in service.get("profiles", ())}
    chosen = {after for word, after in pairwise(words) if word == "--profile"}
    assert chosen <= profiles, f"no profile {chosen - profiles}"
    if "run" in words:
        begin = next(place for place in range(words.index("run") + 1, len(words)) if words[place] in COMPOSE)
        service, given = words[begin], words[begin + 1 :]
        if service == "loadtest":
            loadtest_options.parser().parse_args(list(given))
        else:
            check_nvium(given)
    if "restart" in words:
        assert words[-1] in COMPOSE


def check_helm(words: Sequence[str]) -> None:
    pairs = list(pairwise(words))
    for chart in (word for word in words if word.startswith("deploy/")):
        assert (ROOT / chart).exists(), chart
    if "deploy/helm/nvium" in words:
        schema = json.loads((CHART / "values.schema.json").read_text())
        for path in (after.partition("=")[0] for word, after in pairs if word == "--set"):
            check_value(schema, path)


def check_value(schema: dict[str, Any], path: str) -> None:
    """The chart knows what is set."""
    for key in path.split("."):
        assert key in schema.get("properties", {}), f"{path}: the chart has no {key}"
        schema = schema["properties"][key]


def check_make(words: Sequence[str]) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for word in words:
        name, is_variable, _ = word.partition("=")
        assert re.search(rf"^{name} *\?=" if is_variable else rf"^{name}:", makefile, re.MULTILINE), word


def check_pip(words: Sequence[str]) -> None:
    """Our extras, or packages of which the tests have a version."""
    constraints = (ROOT / "constraints.txt").read_text()
    for word in words[1:]:
        if extra := re.fullmatch(r"(?:nvium|\.|.*\.whl)\[(\w+)\]", word):
            assert extra[1] in PROJECT["project"]["optional-dependencies"], word
        elif wheel := re.fullmatch(r"nvium-(.*)-py3-none-any\.whl", word):
            assert wheel[1] == PROJECT["project"]["version"], word
        elif re.fullmatch(r"[a-z]\w*", word):
            assert re.search(rf"^{word}==", constraints, re.MULTILINE), word


def check_python(words: Sequence[str]) -> None:
    """Our programs' options, which are looked for in their sources; other people's modules are there."""
    if words[0] != "-m":
        sources = (ROOT / words[0]).read_text()
    elif words[1] == "nvium_core.training.tales":
        check_command(TALES, words[2:])
        return
    elif words[1] == "loadtest" and not words[-1].startswith("--"):
        loadtest_options.parser().parse_args(list(words[2:]))
        return
    else:
        options_of = {"loadtest": "loadtest.options", "tests.faults": "tests.faults.__main__"}
        sources = source_of(options_of.get(words[1], words[1]))
    asked = {word.partition("=")[0] for word in words if word.startswith("--")}
    known = {
        node.value for node in ast.walk(ast.parse(sources)) if isinstance(node, ast.Constant) and node.value in asked
    }
    assert asked == known, f"{words}: no {asked - known}"
    if list(words[:3]) == ["-m", "pytest", "-m"]:
        markers = PROJECT["tool"]["pytest"]["ini_options"]["markers"]
        assert words[3] in [marker.partition(":")[0] for marker in markers]


def check_serve(words: Sequence[str]) -> None:
    """Ray's command: the application is where it is looked for."""
    module, _, name = words[-1].partition(":")
    assigned = [node for node in ast.parse(source_of(module)).body if isinstance(node, ast.Assign | ast.AnnAssign)]
    targets = [target for node in assigned for target in getattr(node, "targets", [getattr(node, "target", None)])]
    assert name in [target.id for target in targets if isinstance(target, ast.Name)], words[-1]


def source_of(module: str) -> str:
    found = importlib.util.find_spec(module)
    assert found, f"no module {module}"
    return Path(found.origin).read_text() if found.origin else ""


@cache
def option_names() -> frozenset[str]:
    """Of all our programs."""
    nvium = {
        option
        for command in (*NVIUM.commands.values(), *TALES.commands.values())
        for parameter in command.params
        for option in (*parameter.opts, *parameter.secondary_opts)
    }
    folders = (ROOT / "loadtest", ROOT / "deploy", ROOT / "docs", ROOT / "tests")
    sources = "".join(path.read_text() for folder in folders for path in folder.rglob("*.py"))
    return frozenset(nvium) | frozenset(re.findall(r"\"(--[a-z][a-z-]+)\"", sources)) | {"--help", "--version"}
