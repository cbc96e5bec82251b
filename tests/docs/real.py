"""Checks a command against its program's parser or sources, without running it."""

import ast
import importlib.util
import re
import tomllib
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import typer
import yaml

from loadtest.__main__ import app as loadtest_app
from nvium_core.cli import app
from nvium_core.training.recipes.catalogue import recipe_named
from research.tales.__main__ import app as tales_app
from server.settings import read_settings
from tests.docs.pages import ROOT

SERVICES = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PLACEHOLDER = re.compile(r"\[?[A-Z]+(?:…|\])*|….*|.*…")
"""`MODEL`, `[MODEL]`, `FILE…`."""

NVIUM: Any = typer.main.get_command(app)
TALES: Any = typer.main.get_command(tales_app)
LOADTEST: Any = typer.main.get_command(loadtest_app)


def check(command: Sequence[str]) -> None:
    """Raise an error if the command or one of its options does not exist. Unknown programs are accepted."""
    program, *words = command
    if program in CHECKS:
        CHECKS[program](words)


def check_nvium(words: Sequence[str]) -> None:
    """Check all values of a complete command, else its name and the names of its options."""
    if not words or words[0].startswith("--"):
        assert set(words) <= {"--version", "--help", "--install-completion", "--show-completion"}, words
        return
    values = check_command(NVIUM, words)
    if values and words[0] == "train":
        recipe_named(values["recipe"], values["settings"])
    if values and words[0] == "serve":
        read_settings({key: value for key, value in values.items() if value is not None})


def check_command(program: Any, words: Sequence[str]) -> dict[str, Any]:
    """Return the values of the options, or an empty dict if the command has placeholders."""
    name, *arguments = words
    command = program.commands[name]
    has_placeholder = any(PLACEHOLDER.fullmatch(word) for word in arguments)
    lacks_value = bool(arguments) and arguments[-1] in options_with_value(command)
    is_complete = not has_placeholder and not lacks_value and len(arguments) >= num_required(command)
    if not is_complete or "--help" in arguments:
        known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        used = {word.partition("=")[0] for word in arguments if word.startswith("--")} - {"--help"}
        assert used <= known, f"{name} has no {used - known}"
        return {}
    return command.make_context(name, arguments).params


def options_with_value(command: Any) -> set[str]:
    with_value = [parameter for parameter in command.params if not getattr(parameter, "is_flag", False)]
    return {option for parameter in with_value for option in parameter.opts}


def num_required(command: Any) -> int:
    return sum(2 if parameter.opts[0].startswith("--") else 1 for parameter in command.params if parameter.required)


def check_docker(words: Sequence[str]) -> None:
    profiles = {profile for service in SERVICES.values() for profile in service.get("profiles", ())}
    chosen = {after for word, after in pairwise(words) if word == "--profile"}
    assert chosen <= profiles, f"no profile {chosen - profiles}"


def check_helm(words: Sequence[str]) -> None:
    assert [word for word in words if word.startswith("deploy/") and not (ROOT / word).exists()] == []


def check_make(words: Sequence[str]) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for word in words:
        name, is_variable, _ = word.partition("=")
        assert re.search(rf"^{name} *\?=" if is_variable else rf"^{name}:", makefile, re.MULTILINE), word


def check_pip(words: Sequence[str]) -> None:
    """Check that our extras exist and that constraints.txt pins other packages."""
    constraints = (ROOT / "constraints.txt").read_text()
    for word in words[1:]:
        if extra := re.fullmatch(r"(?:nvium|\.|.*\.whl)\[(\w+)\]", word):
            assert extra[1] in PROJECT["project"]["optional-dependencies"], word
        elif re.fullmatch(r"[a-z]\w*", word):
            assert re.search(rf"^{word}==", constraints, re.MULTILINE), word


def check_python(words: Sequence[str]) -> None:
    """Check that a module exists and that its source contains the options."""
    if words[0] != "-m":
        sources = (ROOT / words[0]).read_text()
    elif words[1] == "research.tales":
        check_command(TALES, words[2:])
        return
    elif words[1] == "loadtest" and not words[-1].startswith("--"):
        LOADTEST.make_context("loadtest", list(words[2:]))
        return
    else:
        sources = source_of(words[1])
    used = {word.partition("=")[0] for word in words if word.startswith("--")}
    known = {node.value for node in ast.walk(ast.parse(sources)) if isinstance(node, ast.Constant)}
    known |= {f"--{name}".replace("_", "-") for name in re.findall(r"^    (\w+): Annotated", sources, re.MULTILINE)}
    assert used <= known, f"{words}: no {used - known}"
    if list(words[:3]) == ["-m", "pytest", "-m"]:
        markers = PROJECT["tool"]["pytest"]["ini_options"]["markers"]
        assert words[3] in [marker.partition(":")[0] for marker in markers]


def source_of(module: str) -> str:
    """Return the source that `python -m` runs, which is `__main__` of a package."""
    file = Path(importlib.util.find_spec(module).origin)
    return (file.with_name("__main__.py") if file.name == "__init__.py" else file).read_text()


CHECKS: dict[str, Callable[[Sequence[str]], None]] = {
    "nvium": check_nvium,
    "docker": check_docker,
    "helm": check_helm,
    "make": check_make,
    "pip": check_pip,
    "python": check_python,
}
