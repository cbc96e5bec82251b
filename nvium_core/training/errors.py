"""The error that stops a run."""

from nvium_core.errors import NviumError


class TrainingError(NviumError, RuntimeError):
    """Settings, data or a state with which training cannot start or continue. The last checkpoint is intact."""
