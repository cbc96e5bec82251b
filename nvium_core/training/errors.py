"""The error that ends a run."""

from nvium_core.errors import NviumError


class TrainingError(NviumError, RuntimeError):
    """Training cannot go on; the last checkpoint is intact."""
