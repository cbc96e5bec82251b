"""N-vium: the mixture-of-exits transformer (arXiv 2605.13190), its engine and its training.

Importing the package registers the model with transformers' Auto classes. The `nvium` command and replicas of Ray skip
the registration, because they should not wait for it. Exported names are imported on first use.
"""

import ast
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nvium_core.choices import Device, FinishReason, Precision, Sampling, Schedule
    from nvium_core.engine.config import EngineConfig
    from nvium_core.engine.constraint import Constraint, TooCostly
    from nvium_core.engine.engine import Engine
    from nvium_core.engine.errors import (
        ConstraintLimit,
        ContextLengthExceeded,
        EngineError,
        EngineStopped,
        InvalidRequest,
        NoTokenAllowed,
    )
    from nvium_core.engine.events import (
        Completion,
        Event,
        FailureEvent,
        PromptEvent,
        Score,
        StepReport,
        TokenEvent,
        best,
    )
    from nvium_core.engine.limits import sampling_defaults, with_defaults
    from nvium_core.engine.sampling_params import SamplingParams
    from nvium_core.engine.worker import Admitted, ChoiceKey, EngineWorker, Observe, TokenStream, WorkerState
    from nvium_core.errors import CheckpointError, NviumError
    from nvium_core.llm import LLM, Completions, Piece, TextCompletion
    from nvium_core.loading import LoadedModel, load_model
    from nvium_core.model.causal_lm import NviumForCausalLM
    from nvium_core.model.config import NviumConfig
    from nvium_core.options import ServerOptions

_IMPORTS = [node for node in ast.walk(ast.parse(Path(__file__).read_bytes())) if isinstance(node, ast.ImportFrom)]
_MODULE_OF = {name.name: str(node.module) for node in _IMPORTS if node.col_offset for name in node.names}
"""Exported name → its module, as read from the indented imports above."""

__all__ = list(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})


def _is_command() -> bool:
    return Path(sys.argv[0]).name == "nvium" or f"{__name__}.cli" in sys.orig_argv or "server.ray_app" in sys.modules


if not _is_command():
    import_module(f"{__name__}.model.causal_lm")
