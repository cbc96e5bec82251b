"""Errors of sequences that did not finish."""

from nvium_core.engine.events import FailureEvent, FailureReason
from nvium_core.errors import NviumError


class EngineError(NviumError, RuntimeError):
    """A sequence could not be run to its end."""


class DeviceLost(EngineError):
    """The device has failed; no sequence can run on it any more."""


class EngineStopped(EngineError):
    """Ended because the engine was stopped."""


class ConstraintLimit(EngineError):
    """Its constraint costs too much to follow further."""


class NoTokenAllowed(EngineError):
    """Its constraint allows no token of the model."""


KINDS: dict[FailureReason, type[EngineError]] = {
    "failed": EngineError,
    "stopped": EngineStopped,
    "constraint_limit": ConstraintLimit,
    "no_token_allowed": NoTokenAllowed,
}


def error_of(event: FailureEvent) -> EngineError:
    return KINDS[event.reason](event.message)
