"""The base class of all errors that a user can cause. Every other exception is a bug."""

import re


class NviumError(Exception):
    """An error that the user can correct. The message says how."""


class CheckpointError(NviumError, ValueError):
    """A model cannot be loaded. The message names the file, field or tensor."""


class DataError(NviumError, ValueError):
    """Training text or conversations are unusable."""


class TrainingError(NviumError, RuntimeError):
    """Settings, data or a state with which training cannot start or continue. The last checkpoint is intact."""


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or repr(error)


REPHRASED = {
    r"(?<=: )Value error, ": "",
    r"^Extra inputs are not permitted$": "is unknown",
    r"^Field required$": "is missing",
    r"^Got unexpected extra argument\S* \((\S+).*\)$": r"unexpected argument '\1'",
    r", unable to .*| after validation, not \d+$": "",
    r"\b(Input|List|Tuple|String|Dictionary) should": "must",
    r"must be a valid integer.*": "must be an integer",
    r"must be a valid boolean": "must be true or false",
    r"must be a valid (list|tuple)": "must be a list",
    r"must be a valid dictionary.*": "must be an object",
    r"must be a valid (number|string)": r"must be a \1",
    r"must be less than inf$": "must be a finite number",
    r"(?<=\d) item$": " entry",
    r"(?<=\d) items$": " entries",
    r"'cuda:(\d+)' is not one of .*|must be .*auto.*, got 'cuda:(\d+)'$": (
        r"must be 'cuda'; for GPU \1\2, set CUDA_VISIBLE_DEVICES=\1\2 in the environment"
    ),
    r"'optimal' is not one of .*|must be 'race'.*, got 'optimal'$": "'optimal' is called 'race' now",
    r"'synchronous' is not one of .*|must be 'race'.*, got 'synchronous'$": "'synchronous' is called 'whole' now",
}
"""Phrases of pydantic and click → plain English."""


def rephrase(message: str) -> str:
    """Rephrase an error message of pydantic or click in plain English. Keep the text of our own `ValueError`s."""
    if message.startswith("Value error, "):
        return message.removeprefix("Value error, ")
    for phrase, words in REPHRASED.items():
        message = re.sub(phrase, words, message)
    return message
