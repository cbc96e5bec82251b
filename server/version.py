"""The version of the installed package."""

from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version


def version() -> str:
    """Return nvium's version, or `unknown` if the package is not installed."""
    try:
        return installed_version("nvium")
    except PackageNotFoundError:
        return "unknown"
