"""The error that stops a run."""

from nvium_core.errors import NviumError


class TrainingError(NviumError, RuntimeError):
    """Training cannot start or continue. The last checkpoint is intact."""
