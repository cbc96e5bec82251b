"""Import what a recipe names: a loss or a model."""

from pkgutil import resolve_name
from typing import Any

from nvium_core.training.errors import TrainingError


def imported(name: str) -> Any:
    """Import `package.module.NAME`. Raise `TrainingError` if there is no such class or function."""
    try:
        found = resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise TrainingError(f"{name}: cannot be imported ({error}); expected package.module.NAME") from error
    if not callable(found):
        raise TrainingError(f"{name}: must name a class or function")
    return found
