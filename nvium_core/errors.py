"""The base class of all errors that a user can cause. Every other exception is a bug."""

import re


class NviumError(Exception):
    """An error that the user can correct. The message says how."""


def plain(message: str) -> str:
    """Rephrase an error message of pydantic or click in plain English."""
    words = {"Extra inputs are not permitted": "is unknown", "Field required": "is missing"}
    shortened = re.sub(r"Value error, |, unable to parse .*", "", message)
    return words.get(message) or shortened.replace("Input should be", "must be")
