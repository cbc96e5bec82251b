"""Rules of the source code: allowed imports, reads of the environment, file lengths, and forbidden strings."""

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import nvium_core
from tests.model.gguf_files import write_gguf
from tests.model.test_backbones import random_model
from tests.test_gguf_conversion import FIELDS, SMALL

ROOT = Path(__file__).parent.parent
PACKAGES = ("nvium_core", "server", "loadtest", "research")
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
}

CORE = "nvium_core"
WORDS, ERRORS, OPTIONS = f"{CORE}.choices", f"{CORE}.errors", f"{CORE}.options"
MODEL, ENGINE, TRAINING = f"{CORE}.model", f"{CORE}.engine", f"{CORE}.training"
LOADING, EVALUATION, BENCH = f"{CORE}.loading", f"{CORE}.evaluation", f"{CORE}.bench"
SCHEDULE, DEVICE = f"{ENGINE}.schedule", f"{ENGINE}.device"
SHARED = ("config", "constraint", "errors", "events", "sampling_params")
ASKED_AND_TOLD = tuple(f"{ENGINE}.{name}" for name in SHARED)
STEPS = tuple(f"{SCHEDULE}.{name}" for name in ("sequence", "step"))
"""What the device reads of a Step. Not who chooses it."""
TEXT, LLM = f"{CORE}.text", f"{CORE}.llm"
CONVERSION, TERMINAL = f"{CORE}.conversion", f"{CORE}.terminal"

MAY_IMPORT = {
    WORDS: (),
    ERRORS: (),
    MODEL: (WORDS, ERRORS, MODEL),
    LOADING: (WORDS, ERRORS, MODEL, TEXT),
    CONVERSION: (WORDS, ERRORS, MODEL, LOADING),
    LLM: (WORDS, ERRORS, MODEL, LOADING, ENGINE, TEXT),
    TERMINAL: (WORDS, ERRORS, MODEL, LOADING, ENGINE, LLM),
    ENGINE: (WORDS, ERRORS, MODEL, ENGINE),
    TRAINING: (WORDS, ERRORS, MODEL, TEXT, OPTIONS, TRAINING),
    f"{TRAINING}.retrofitting": (WORDS, ERRORS, MODEL, ENGINE, TEXT, OPTIONS, TRAINING),
    SCHEDULE: (WORDS, ERRORS, SCHEDULE, *ASKED_AND_TOLD),
    DEVICE: (WORDS, ERRORS, MODEL, *STEPS, DEVICE, *ASKED_AND_TOLD),
    TEXT: (WORDS, ERRORS, TEXT),
    OPTIONS: (WORDS, ERRORS, f"{ENGINE}.config"),
    EVALUATION: (WORDS, ERRORS, MODEL, LOADING, ENGINE, TRAINING, BENCH, EVALUATION),
    BENCH: (WORDS, ERRORS, MODEL, LOADING, ENGINE, TRAINING, BENCH),
    "server": ("server", CORE, ERRORS),
    "loadtest": ("loadtest",),
    "research": ("research", CORE, "server", "loadtest"),
}
"""The packages of ours that a package may import. The commands and `nvium_core/__init__.py` may import all."""

COMMANDS = (f"{CORE}.cli", f"{CORE}.commands")
SERVER_ONLY = ("fastapi", "starlette", "pydantic", "pydantic_core", "pydantic_settings", "uvicorn", "llguidance")
TORCH_FREE = (SCHEDULE, OPTIONS, *ASKED_AND_TOLD)
"""Scheduling and the engine's interface; only `engine.device` computes with tensors."""
READS_ENVIRONMENT = {"server.settings", f"{CORE}.bench.contenders.llama_cpp"}
"""The settings, and a benchmark that reads a variable of another package."""
MAX_FILE_LINES = 400

FORBIDDEN_IMPORTS = [
    ("nvium_core.model.x", "def f():\n    import nvium_core.training.objective"),
    ("nvium_core.engine.device.x", "from nvium_core.engine.schedule import scheduler"),
    ("nvium_core.engine.x", "from pydantic import BaseModel"),
    ("server.x", "from nvium_core.engine.engine import Engine"),
    ("server.x", "import nvium_core"),
    ("loadtest.x", "from nvium_core import Engine"),
    ("nvium_core.evaluation.x", "from research.paper.results import SCALES"),
]

# Concatenated, so that this file does not contain the forbidden string.
TORCH_INDEX = "download." + "pytorch.org"
REGISTRIES = re.compile(r"pypi\.org|pythonhosted\.org|npmjs\.org|download\.pytorch\.org|ghcr\.io")
MACHINE_PATHS = re.compile(r"(?<![a-zA-Z0-9_.])/(?:work|root|farm|opt/wheels|opt/pypi[a-z-]*)/")


def imports(source: str) -> Iterator[str]:
    """Yield every imported module, and `module.name` for each name imported from a module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "use absolute imports"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_within(module: str, packages: tuple[str, ...]) -> bool:
    return any(f"{module}.".startswith(f"{package}.") for package in packages)


def home(module: str) -> str | None:
    """Return the innermost package with a rule that contains the module; None if the module may import everything."""
    if module == CORE or is_within(module, COMMANDS):
        return None
    return max((package for package in MAY_IMPORT if is_within(module, (package,))), key=len)


def forbidden_imports(module: str, source: str) -> list[str]:
    """Return the imports of a module that `MAY_IMPORT` forbids."""
    package = home(module)
    if package is None:
        return []
    ours = [name for name in imports(source) if is_within(name, PACKAGES)]
    wrong = [name for name in ours if not is_within(name, MAY_IMPORT[package])]
    if package != "server":
        return wrong + [name for name in imports(source) if is_within(name, SERVER_ONLY)]
    of_core = [name for name in ours if is_within(name, (CORE,)) and not is_within(name, (TEXT, ERRORS))]
    return wrong + [name for name in of_core if not is_exported(name)]


def room(module: str) -> str:
    """Return the folder of the server that contains the module, or the module itself if it is in none."""
    return ".".join(module.split(".")[:2])


def rooms_in_order(sources: Mapping[str, str]) -> list[str]:
    """Return the rooms of the server's modules, each after those that it imports. Raise `CycleError` for a circle."""
    graph = TopologicalSorter[str]()
    for module, source in sources.items():
        others = {room(name) for name in imports(source) if is_within(name, ("server",))} - {room(module)}
        graph.add(room(module), *others)
    return list(graph.static_order())


def is_exported(name: str) -> bool:
    return name.removeprefix("nvium_core.") in nvium_core.__all__


def environment_reads(source: str) -> list[str]:
    """Return the source's accesses to the process environment."""
    names = [f"os.{node.attr}" for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)]
    return [name for name in [*names, *imports(source)] if name in ("os.environ", "os.environb", "os.getenv")]


def foreign_places(text: str) -> list[str]:
    """Return registry hosts and machine-specific paths. PyTorch's index is allowed as default of TORCH_INDEX_URL."""
    lines = (line for line in text.splitlines() if not ("TORCH_INDEX_URL" in line and TORCH_INDEX in line))
    return [match.group() for line in lines for rule in (REGISTRIES, MACHINE_PATHS) for match in rule.finditer(line)]


def tracked_files() -> list[Path]:
    """Return files that are tracked or would be added, without deleted ones."""
    if not shutil.which("git") or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [path for name in listed.split("\0") if name and (path := ROOT / name).is_file()]


def modules_after(statements: str) -> set[str]:
    """Return all loaded modules after these statements, as in the `nvium` command, which does not import the model."""
    command = [sys.executable, "-c", f"import sys; sys.argv[0] = 'nvium'; {statements}; print(*sys.modules)"]
    return set(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split())


def test_packages_import_only_what_they_may():
    found = {module: forbidden_imports(module, path.read_text()) for module, path in MODULES.items()}
    assert {module: names for module, names in found.items() if names} == {}


def test_a_forbidden_import_is_found():
    assert [example for example in FORBIDDEN_IMPORTS if len(forbidden_imports(*example)) != 1] == []


def test_rooms_of_the_server_do_not_import_each_other_and_generation_knows_no_http():
    sources = {module: path.read_text() for module, path in MODULES.items() if is_within(module, ("server",))}
    sources["server.http.x"] = "import server.generation.service"
    assert "server.structured_outputs" in rooms_in_order(sources)
    for room_, back in (("schemas", "import server.generation.service"), ("generation", "import server.http")):
        with pytest.raises(CycleError):
            rooms_in_order(sources | {f"server.{room_}.x": f"def f():\n    {back}"})


def test_scheduling_needs_no_torch():
    torch_free = [name for name in MODULES if is_within(name, TORCH_FREE)]
    assert len(torch_free) > len(TORCH_FREE)
    assert "torch" not in modules_after(f"import {', '.join(torch_free)}")


def test_serving_a_gguf_file_imports_nothing_slow_that_it_does_not_need(tmp_path):
    slow = {"torch._dynamo", "torch.distributed.tensor", "sympy", "scipy", "matplotlib", TRAINING, f"{CORE}.bench"}
    slow |= {"transformers.models", "transformers.modeling_utils"}
    file = write_gguf(tmp_path / "model.gguf", random_model("llama", SMALL), "Q4_0", tokenizer=FIELDS)
    serve = f"load(read_settings({{'model': {str(file)!r}, 'device': 'cpu'}})).engine.warm_up()"
    imports = f"import {LLM}; from server.app import load; from server.settings import read_settings"
    loaded = modules_after(f"{imports}; {serve}")
    assert "server.app" in loaded and loaded & slow == set()


def test_the_helper_for_chat_templates_starts_before_anything_slow_is_imported():
    assert {"numpy", "jinja2", "transformers"} & modules_after(f"import {CORE}.text.renderer") == set()


def test_only_the_settings_and_a_benchmark_read_the_environment():
    found = {module: environment_reads(path.read_text()) for module, path in MODULES.items()}
    assert {module for module, reads in found.items() if reads} <= READS_ENVIRONMENT
    for source in ("import os\nos.environ['A']", "import os\nos.getenv('A')", "from os import environ, path"):
        assert len(environment_reads(source)) == 1


def test_the_engine_imports_python_s_sequence_as_items():
    offenders = []
    for module, path in MODULES.items():
        source = path.read_text()
        names = set(imports(source))
        is_renamed = "Sequence as Items" in source
        has_both = f"{SCHEDULE}.sequence.Sequence" in names or is_within(module, (ENGINE,))
        if "collections.abc.Sequence" in names and is_renamed != has_both:
            offenders.append(module)
    assert offenders == []


def test_no_source_exceeds_the_maximum_length():
    sources = [*MODULES.values(), *(ROOT / "tests").rglob("*.py")]
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in sources}
    assert {name: length for name, length in lengths.items() if length > MAX_FILE_LINES} == {}


def test_no_file_contains_a_registry_or_a_machine_specific_path():
    texts = {path: path.read_bytes() for path in tracked_files()}
    found = {
        str(path.relative_to(ROOT)): places
        for path, text in texts.items()
        if b"\0" not in text and (places := foreign_places(text.decode(errors="replace")))
    }
    assert found == {}
