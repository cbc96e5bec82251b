"""Which version of the program this is."""

from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version


def version() -> str:
    """`unknown` where it runs without having been installed."""
    try:
        return installed_version("nvium")
    except PackageNotFoundError:
        return "unknown"
