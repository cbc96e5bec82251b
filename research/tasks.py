"""Run tasks of lm-evaluation-harness on a model in this process.

    python -m research.tasks MODEL --tasks arc_easy,mine [--folder tasks/]

A task is one of the harness's own tasks, or a .yaml file in `--folder`. The folder also contains the data of its tasks,
so these tasks need no network.
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
"""Metrics by task. `NAME_stderr` is the standard error of NAME."""


def evaluate_tasks(loaded: LoadedModel, names: Sequence[str], folder: Path | None = None) -> Scores:
    """Run tasks. Raise `EvaluationError` if lm_eval is not installed or does not know a task."""
    lm_eval, hugging_face, manager = (harness(part) for part in ("", ".models.huggingface", ".tasks"))
    known = manager.TaskManager(include_path=str(folder.resolve()) if folder else None)
    unknown = [name for name in names if name not in known.all_tasks]
    if unknown:
        raise EvaluationError(f"tasks: lm_eval has no task {', '.join(unknown)}")
    model = hugging_face.HFLM(pretrained=loaded.model, tokenizer=loaded.tokenizer, add_bos_token=True)
    with chdir(folder) if folder else nullcontext():
        found = lm_eval.simple_evaluate(model=model, tasks=list(names), task_manager=known)
    return {name: scores(found["results"][name]) for name in names}


def harness(part: str) -> Any:
    """Import a module of lm_eval."""
    try:
        return import_module(f"lm_eval{part}")
    except ImportError as error:
        raise EvaluationError(f"tasks need lm_eval ({error}); install it with pip install 'nvium[tasks]'") from error


def scores(results: dict[str, Any]) -> dict[str, float]:
    """Return the numeric metrics. A name `METRIC,FILTER` of the harness becomes `METRIC`."""
    numbers = {name.partition(",")[0]: value for name, value in results.items() if isinstance(value, float | int)}
    return {name: float(value) for name, value in numbers.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(prog="python -m research.tasks", description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help="folder or Hub name [the bundled model]")
    parser.add_argument("--tasks", required=True, help="comma-separated names of tasks")
    parser.add_argument("--folder", type=Path, help="folder with further tasks as .yaml files")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    loaded = load_model(args.model, "cpu")
    found = evaluate_tasks(loaded, args.tasks.split(","), args.folder)
    print(found)
    if args.json:
        write_json(description(loaded) | {"tasks": found}, args.json)


if __name__ == "__main__":
    main()
