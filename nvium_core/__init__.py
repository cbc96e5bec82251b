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
    from nvium_core.choices import Device as Device
    from nvium_core.choices import FinishReason as FinishReason
    from nvium_core.choices import Precision as Precision
    from nvium_core.choices import Sampling as Sampling
    from nvium_core.choices import Schedule as Schedule
    from nvium_core.engine.config import EngineConfig as EngineConfig
    from nvium_core.engine.constraint import Constraint as Constraint
    from nvium_core.engine.constraint import TooCostly as TooCostly
    from nvium_core.engine.engine import Engine as Engine
    from nvium_core.engine.events import Completion as Completion
    from nvium_core.engine.events import Event as Event
    from nvium_core.engine.events import FailureEvent as FailureEvent
    from nvium_core.engine.events import PromptEvent as PromptEvent
    from nvium_core.engine.events import Score as Score
    from nvium_core.engine.events import StepReport as StepReport
    from nvium_core.engine.events import TokenEvent as TokenEvent
    from nvium_core.engine.events import best as best
    from nvium_core.engine.failures import ConstraintLimit as ConstraintLimit
    from nvium_core.engine.failures import EngineError as EngineError
    from nvium_core.engine.failures import EngineStopped as EngineStopped
    from nvium_core.engine.failures import NoTokenAllowed as NoTokenAllowed
    from nvium_core.engine.sampling_defaults import sampling_defaults as sampling_defaults
    from nvium_core.engine.sampling_defaults import with_defaults as with_defaults
    from nvium_core.engine.sampling_params import SamplingParams as SamplingParams
    from nvium_core.engine.token_stream import Admitted as Admitted
    from nvium_core.engine.token_stream import ChoiceKey as ChoiceKey
    from nvium_core.engine.token_stream import TokenStream as TokenStream
    from nvium_core.engine.validation import ContextLengthExceeded as ContextLengthExceeded
    from nvium_core.engine.validation import InvalidRequest as InvalidRequest
    from nvium_core.engine.worker import EngineWorker as EngineWorker
    from nvium_core.engine.worker import Observe as Observe
    from nvium_core.engine.worker import WorkerState as WorkerState
    from nvium_core.errors import CheckpointError as CheckpointError
    from nvium_core.errors import NviumError as NviumError
    from nvium_core.llm import LLM as LLM
    from nvium_core.llm import Completions as Completions
    from nvium_core.llm import Piece as Piece
    from nvium_core.llm import TextCompletion as TextCompletion
    from nvium_core.loading import LoadedModel as LoadedModel
    from nvium_core.loading import load_model as load_model
    from nvium_core.model.causal_lm import NviumForCausalLM as NviumForCausalLM
    from nvium_core.model.config import NviumConfig as NviumConfig
    from nvium_core.options import ServerOptions as ServerOptions

_IMPORTS = [node for node in ast.walk(ast.parse(Path(__file__).read_bytes())) if isinstance(node, ast.ImportFrom)]
_MODULE_OF = {name.name: str(node.module) for node in _IMPORTS for name in node.names if name.asname}
"""Exported name → its module, as read from the imports above."""

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
