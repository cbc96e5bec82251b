"""The errors of training that a user can correct."""

from nvium_core.errors import NviumError


class DataError(NviumError, ValueError):
    """Training text or conversations are unusable."""


class TrainingError(NviumError, RuntimeError):
    """Settings, data or a state with which training cannot start or continue. The last checkpoint is intact."""
