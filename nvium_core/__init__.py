"""N-vium: the mixture-of-exits transformer (arXiv 2605.13190), its engine and its training.

Importing it registers N-viums with transformers' Auto classes. The `nvium` command, whose help does not wait for
PyTorch, imports the model when it needs it. Other names are imported on first use.
"""

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nvium_core.choices import SUGGESTED as SUGGESTED
    from nvium_core.choices import Device as Device
    from nvium_core.choices import Precision as Precision
    from nvium_core.choices import Sampling as Sampling
    from nvium_core.choices import Schedule as Schedule
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
    from nvium_core.engine.events import mean_logprob as mean_logprob
    from nvium_core.engine.failures import ConstraintLimit as ConstraintLimit
    from nvium_core.engine.failures import EngineError as EngineError
    from nvium_core.engine.failures import EngineStopped as EngineStopped
    from nvium_core.engine.failures import NoTokenAllowed as NoTokenAllowed
    from nvium_core.engine.params import ContextLengthExceeded as ContextLengthExceeded
    from nvium_core.engine.params import EngineConfig as EngineConfig
    from nvium_core.engine.params import InvalidRequest as InvalidRequest
    from nvium_core.engine.params import SamplingParams as SamplingParams
    from nvium_core.engine.token_stream import Admitted as Admitted
    from nvium_core.engine.token_stream import ChoiceKey as ChoiceKey
    from nvium_core.engine.token_stream import EngineRequest as EngineRequest
    from nvium_core.engine.token_stream import TokenStream as TokenStream
    from nvium_core.engine.worker import EngineWorker as EngineWorker
    from nvium_core.engine.worker import Observe as Observe
    from nvium_core.engine.worker import WorkerState as WorkerState
    from nvium_core.errors import NviumError as NviumError
    from nvium_core.llm import LLM as LLM
    from nvium_core.llm import Completions as Completions
    from nvium_core.llm import Piece as Piece
    from nvium_core.llm import TextCompletion as TextCompletion
    from nvium_core.loading import LoadedModel as LoadedModel
    from nvium_core.loading import load_model as load_model
    from nvium_core.mapped_weights import load_mapped as load_mapped
    from nvium_core.model.causal_lm import NviumForCausalLM as NviumForCausalLM
    from nvium_core.model.checkpoint import CheckpointError as CheckpointError
    from nvium_core.model.config import NviumConfig as NviumConfig
    from nvium_core.options import ServerOptions as ServerOptions

_HOME = {
    "Device": "choices",
    "Precision": "choices",
    "Sampling": "choices",
    "Schedule": "choices",
    "SUGGESTED": "choices",
    "NviumError": "errors",
    "Constraint": "engine.constraint",
    "TooCostly": "engine.constraint",
    "ConstraintLimit": "engine.failures",
    "Engine": "engine.engine",
    "EngineError": "engine.failures",
    "EngineStopped": "engine.failures",
    "NoTokenAllowed": "engine.failures",
    "Completion": "engine.events",
    "Event": "engine.events",
    "FailureEvent": "engine.events",
    "PromptEvent": "engine.events",
    "Score": "engine.events",
    "StepReport": "engine.events",
    "TokenEvent": "engine.events",
    "best": "engine.events",
    "mean_logprob": "engine.events",
    "ContextLengthExceeded": "engine.params",
    "EngineConfig": "engine.params",
    "InvalidRequest": "engine.params",
    "SamplingParams": "engine.params",
    "Admitted": "engine.token_stream",
    "ChoiceKey": "engine.token_stream",
    "EngineRequest": "engine.token_stream",
    "TokenStream": "engine.token_stream",
    "EngineWorker": "engine.worker",
    "Observe": "engine.worker",
    "WorkerState": "engine.worker",
    "CheckpointError": "model.checkpoint",
    "NviumConfig": "model.config",
    "NviumForCausalLM": "model.causal_lm",
    "LLM": "llm",
    "Completions": "llm",
    "Piece": "llm",
    "TextCompletion": "llm",
    "LoadedModel": "loading",
    "load_model": "loading",
    "load_mapped": "mapped_weights",
    "ServerOptions": "options",
}

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})


def _is_command() -> bool:
    """Whether this process is the `nvium` command, whose help does not wait for PyTorch."""
    return Path(sys.argv[0]).name == "nvium" or f"{__name__}.cli" in sys.orig_argv


if not _is_command():
    import_module(f"{__name__}.model.causal_lm")  # registers with transformers' Auto classes
