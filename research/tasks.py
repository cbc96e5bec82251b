"""Tasks of lm-evaluation-harness on our model class in this process. Imports `lm_eval` only when used.

A task is the harness's own, by name, or a .yaml in a folder that also holds its data files; such tasks need no network.

    python -m research.tasks MODEL --tasks arc_easy,mine [--folder tasks/]
"""

from argparse import ArgumentParser
from collections.abc import Sequence
from contextlib import chdir, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

from nvium_core.evaluation.predictions import EvaluationError
from nvium_core.evaluation.suite import description, write_json
from nvium_core.loading import LoadedModel, load_model

Scores = dict[str, dict[str, float]]
"""Each task's metrics; a standard error is `NAME_stderr`."""


def evaluate_tasks(loaded: LoadedModel, names: Sequence[str], folder: Path | None = None) -> Scores:
    """Raises `EvaluationError` if lm_eval is not installed or does not know a task."""
    lm_eval, hugging_face, manager = (harness(part) for part in ("", ".models.huggingface", ".tasks"))
    known = manager.TaskManager(include_path=str(folder.resolve()) if folder else None)
    unknown = [name for name in names if name not in known.all_tasks]
    if unknown:
        raise EvaluationError(f"tasks: lm_eval knows no {', '.join(unknown)}")
    model = hugging_face.HFLM(pretrained=loaded.model, tokenizer=loaded.tokenizer, add_bos_token=True)
    with chdir(folder) if folder else nullcontext():
        found = lm_eval.simple_evaluate(model=model, tasks=list(names), task_manager=known)
    return {name: scores(found["results"][name]) for name in names}


def harness(part: str) -> Any:
    """A module of lm_eval."""
    try:
        return import_module(f"lm_eval{part}")
    except ImportError as error:
        raise EvaluationError(f"tasks need lm_eval ({error}): pip install 'nvium[tasks]'") from error


def scores(results: dict[str, Any]) -> dict[str, float]:
    """The numbers, without names of filters; unknown values are left out."""
    numbers = {name.partition(",")[0]: value for name, value in results.items() if isinstance(value, float | int)}
    return {name: float(value) for name, value in numbers.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(prog="python -m research.tasks", description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help="a folder or Hub name [the bundled model]")
    parser.add_argument("--tasks", required=True, help="of lm_eval, comma separated")
    parser.add_argument("--folder", type=Path, help="where .yaml files describe further ones")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    loaded = load_model(given.model, "cpu")
    found = evaluate_tasks(loaded, given.tasks.split(","), given.folder)
    print(found)
    if given.json:
        write_json(description(loaded) | {"tasks": found}, given.json)


if __name__ == "__main__":
    main()
