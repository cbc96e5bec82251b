"""The separator of documents, and the error of an unusable text."""

from nvium_core.errors import NviumError

END_OF_TEXT = "<|endoftext|>"


class DataError(NviumError, ValueError):
    """Training text or conversations are unusable."""
