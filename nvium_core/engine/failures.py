"""Errors of sequences that did not finish."""

from nvium_core.errors import NviumError


class EngineError(NviumError, RuntimeError):
    """A sequence failed."""


class DeviceLost(EngineError):
    """The device has failed, so no sequence can run any more."""


class EngineStopped(EngineError):
    """The engine was stopped before the sequence finished."""


class ConstraintLimit(EngineError):
    """The sequence's constraint exceeded its cost limits."""


class NoTokenAllowed(EngineError):
    """The sequence's constraint allows no token of the vocabulary."""
